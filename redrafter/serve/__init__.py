"""Serving: requests of every kind side by side in one engine."""
