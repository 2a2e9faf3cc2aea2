"""The data on disk for the pages: rollouts by number, selections, tokens, and the tables beside them."""
