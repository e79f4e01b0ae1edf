"""Measure a drafter for many shapes of tree, along texts that the base wrote once."""
