"""KV caches: the keys and values of committed tokens, one buffer per row or in blocks that rows share."""
