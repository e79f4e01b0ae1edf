"""Measurements of `redrafter bench`."""
