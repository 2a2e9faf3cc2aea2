"""``doctor``: what this machine and this install can do, and what is wrong with them."""
