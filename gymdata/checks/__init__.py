"""Checks of rollouts and pairs: one file per code or family in ``codes``, what violations are in ``violations``, the causes
of breaks in ``breaks``, what ``--fix`` keeps in ``repair``.

Invariants: pure; no Python loop over tokens; every fault is found at its exact row, turn and position; what a check keeps of
a path is hashes, ids and numbers of each rollout, in arrays.
"""
