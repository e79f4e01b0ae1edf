"""Proposers of token trees: a recurrent drafter, a smaller LM, or the text's own repetitions."""
