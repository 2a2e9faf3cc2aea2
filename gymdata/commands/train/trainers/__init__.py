"""The process that trains: one file per trainer. A loss of `train-rl` is added to `PolicyLoss` in `policy_loss`."""
