"""What is on disk, as the pages need it: rollouts by number, selections of them, their tokens, and the tables beside them."""
