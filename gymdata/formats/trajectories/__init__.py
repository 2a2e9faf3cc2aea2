"""Trajectories of agent toolkits: those of the NeMo Agent Toolkit (``nat…``) and ATIF, the Agent Trajectory Interchange
Format.

Both are models of the published schemas, by which files are read, refused and written. Invariants: token ids and
log-probabilities become turns only where prompt and generation are both there; the row that a trajectory was made of is in
its free object (``metadata``, ``extra``) under ``gymdata``, so that it comes back; what cannot be held at all is counted.
"""
