"""Formats of answers, whole or as a stream."""
