"""Keys and values of committed tokens: in one tensor per layer, or in blocks that rows share."""
