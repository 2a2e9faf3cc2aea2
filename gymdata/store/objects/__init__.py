"""Object stores: how ``s3://``, ``gs://``, ``az://`` and ``hf://`` paths are read, and all but the last written, through a
local mirror, the spool."""
