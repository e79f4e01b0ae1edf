"""Check connections, keys and bodies before a request is handled."""
