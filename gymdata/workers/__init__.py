"""Work by several processes and threads: files in parts, results in order, and what makes long commands faster and smaller."""
