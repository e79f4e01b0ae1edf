"""Regenerate the answers of a data set with the base, as training data for its drafter."""
