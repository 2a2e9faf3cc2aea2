"""Rollouts that other harnesses saved as text, a file for each harness or shape."""
