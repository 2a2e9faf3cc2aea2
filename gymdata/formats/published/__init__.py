"""Data sets that are published in shapes of their own: preferences, ratings, conversations, calls of tools."""
