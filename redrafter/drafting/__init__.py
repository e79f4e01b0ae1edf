"""Proposers of token trees: drafters, a smaller LM, recycled tokens, or the text's own repetitions."""
