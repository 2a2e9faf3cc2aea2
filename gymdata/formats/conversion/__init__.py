"""Rows of other projects become rollouts or pairs here, and rollouts become theirs: what every format shares."""
