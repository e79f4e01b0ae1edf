"""Converters of checkpoints."""
