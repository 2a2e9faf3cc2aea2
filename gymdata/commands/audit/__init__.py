"""``gymdata audit``: saved logprobs against a model."""
