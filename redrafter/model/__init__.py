"""Targets: Hugging Face causal LMs bound so that they verify token trees, and the requirements of binding."""
