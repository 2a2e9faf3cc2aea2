"""The kernel: tables, turns, breaks and their checks; pure."""
