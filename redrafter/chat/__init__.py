"""Turn messages into text, in one way for training, measuring, commands and the server."""
