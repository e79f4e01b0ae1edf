"""Any Hugging Face causal LM, bound so that it can verify token trees."""
