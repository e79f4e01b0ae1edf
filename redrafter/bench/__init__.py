"""Measurements of `redrafter bench` and `redrafter tune`."""
