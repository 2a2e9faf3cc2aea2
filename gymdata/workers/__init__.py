"""Work by several processes and threads: files in parts, results in order, less memory and rarer garbage collection."""
