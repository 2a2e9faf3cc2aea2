"""NeMo Gym rollouts: one row reader for `import` and `validate`, a faster scanner for well-formed rows, and the writer."""
