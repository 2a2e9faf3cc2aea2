"""Object stores: ``s3://``, ``gs://``, ``az://`` and ``hf://`` paths are read where they are; outputs are written in a
local staging folder and uploaded, to all but the last."""
