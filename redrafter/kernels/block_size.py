"""The size of a block of the paged cache, for which the kernels are compiled."""

BLOCK_SIZE = 16  # slots; a slot holds the keys and values of one token
