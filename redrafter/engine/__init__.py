"""`generate`: one call from its arguments to its tokens."""
