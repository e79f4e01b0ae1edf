"""The size of a block of the paged cache, which kernels are compiled for and the block manager hands out."""

__all__ = ["BLOCK_SIZE"]

BLOCK_SIZE = 16  # slots, each for one token's keys and values
