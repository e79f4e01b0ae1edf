"""Run the engine in a separate process, so that the GPU never waits for HTTP, JSON or detokenization."""
