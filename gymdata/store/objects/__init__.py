"""Object stores: how ``s3://``, ``gs://`` and ``az://`` paths are read and written through a local mirror, the spool."""
