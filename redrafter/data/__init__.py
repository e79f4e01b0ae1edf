"""From files and datasets to prompts and to batches of token ids with a loss mask."""
