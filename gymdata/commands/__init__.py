"""One folder per command, or per family of commands."""
