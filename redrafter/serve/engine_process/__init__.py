"""The process of the engine, so that the GPU never waits for HTTP, JSON or text, and the server's line to it."""
