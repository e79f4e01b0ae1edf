"""Measure a drafter for many tree shapes, on texts that the base generates once."""
