"""NeMo Gym rollouts: one row reader for `import` and `validate`, and the writer."""
