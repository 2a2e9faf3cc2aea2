"""``gymdata show``: rollouts and pairs as people read them."""
