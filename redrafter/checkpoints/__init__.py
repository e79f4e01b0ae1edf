"""Checkpoints on disk: what they say of themselves, and how they are loaded."""
