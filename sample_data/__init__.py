"""A calculator task set, a tiny half-trained policy that calls the tool, and rollouts that it collected.

What the README, the demo and the tests run on. Everything here is made by the scripts beside it; README.md says how.
"""
