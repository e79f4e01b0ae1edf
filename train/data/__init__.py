"""From files to batches of token ids with a loss mask."""
