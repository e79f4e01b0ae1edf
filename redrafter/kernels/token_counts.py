"""Of how many tokens forwards are made, on which kernels and callers agree."""

TOKEN_MULTIPLE = 8  # of a forward's tokens: matrix products like it, and no forward is then of one token
TOKENS_PER_CHUNK = 16  # tokens of a forward for each chunk of a prompt that it has room for; a chunk may have more
