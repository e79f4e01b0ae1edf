"""Checkpoints on disk: reading configs and tensor headers, and loading models, drafters and tokenizers."""
