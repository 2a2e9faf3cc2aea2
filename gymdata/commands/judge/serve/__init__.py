"""`gymdata serve-genrm`: pairwise judging over HTTP, in cohorts, for online trainers."""
