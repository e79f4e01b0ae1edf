"""Training data: rows, documents, prompts, and batches of token ids with a loss mask."""
