"""Read what the model writes, and format it as whole or streamed answers."""
