"""Offline work by several processes: files in parts, and results in order."""
