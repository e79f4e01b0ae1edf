"""Checkpoints in the formats of others, read as configs and tensors of this project, and written in theirs."""
