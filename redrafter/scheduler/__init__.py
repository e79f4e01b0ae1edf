"""Continuous batching: who waits, who is read, who steps. It knows nothing of HTTP."""
