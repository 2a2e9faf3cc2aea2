"""Which score of a rollout a command means."""
