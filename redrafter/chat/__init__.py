"""From messages to text: one way for training, measuring, commands and the server."""
