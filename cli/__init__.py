"""The command line: one thin file a command. Each parses its flags, calls one library function, and prints."""
