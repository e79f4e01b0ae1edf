"""Targets: Hugging Face causal LMs bound so that they verify token trees, and what binding asks of a model."""
