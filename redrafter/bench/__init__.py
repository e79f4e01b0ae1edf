"""`redrafter bench`: how fast a pair writes, and what it was measured on."""

__all__: list[str] = []
