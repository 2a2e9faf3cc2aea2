"""``gymdata demo``: the main job on the shipped policy and tasks."""
