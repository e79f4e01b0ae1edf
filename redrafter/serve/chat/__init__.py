"""Chat templates, control tokens, tools and thoughts."""
