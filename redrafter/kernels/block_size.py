"""Sizes that the kernels are compiled for, and other code lays out its tensors by."""

BLOCK_SIZE = 16  # slots of a block of the paged cache; a slot holds the keys and values of one token
CHUNK = 1024  # token ids that a program of a search's first pass reads
