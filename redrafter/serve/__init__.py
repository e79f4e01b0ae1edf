"""The OpenAI-compatible server: requests of every kind share the steps of one engine."""
