"""Rows without token ids: prompts, messages and answers as text, read and written."""
