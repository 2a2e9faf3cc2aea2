"""Trajectories of agent toolkits: those of the NeMo Agent Toolkit (``nat_…``) and ATIF, the Agent Trajectory Interchange
Format (``atif_…``).

Both are models of the published schemas, by which files are read, refused and written. Invariants: token ids and
log-probabilities become turns only where prompt and generation are both there; what a format has no field for goes into its
free object (``metadata``, ``extra``) under ``gymdata``, so that it comes back; what cannot be held at all is counted.
"""
