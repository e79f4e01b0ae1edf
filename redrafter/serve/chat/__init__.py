"""Chat templates, control tokens, tools and thoughts: from messages to a prompt and back."""
