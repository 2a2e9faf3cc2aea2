"""What is on disk, as the pages need it: rollouts by number, selections, tokens, and the tables beside them."""
