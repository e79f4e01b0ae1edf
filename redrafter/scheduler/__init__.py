"""Continuous batching of sequences over one engine. It knows nothing of HTTP."""
