"""The size of a block of the paged cache, for which the kernels are compiled."""

__all__ = ["BLOCK_SIZE"]

BLOCK_SIZE = 16  # slots; a slot holds the keys and values of one token
