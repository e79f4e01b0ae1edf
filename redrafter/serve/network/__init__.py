"""Connections, keys and bodies of requests: what is checked before a request is read."""
