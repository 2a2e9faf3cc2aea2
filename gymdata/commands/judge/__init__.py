"""``gymdata judge`` and ``serve-genrm``: pairwise judging."""
