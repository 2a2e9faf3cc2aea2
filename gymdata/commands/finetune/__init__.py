"""``gymdata finetune``: epochs of collect, train and validate."""
