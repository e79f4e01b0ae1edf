"""Check every causal LM that transformers registers, made tiny and random, against what transformers writes with it.

Run `make zoo`, or `PYTHONPATH=tests python -m zoo --only llama gemma2`.
"""
