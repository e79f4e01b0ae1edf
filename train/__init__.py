"""Trainers of drafters."""
