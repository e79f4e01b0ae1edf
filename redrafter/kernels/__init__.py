"""Triton kernels, each beside a slow reference in plain torch that the tests hold it to.

TRITON says whether they are there to be called; where they are not, the references serve.
"""

from importlib.util import find_spec

__all__ = [
    "MOST_TOKENS",
    "TRITON",
    "ancestors",
    "commit",
    "draw",
    "gumbel",
    "pick",
    "suits",
    "thin_linear",
    "tree_attention",
]

TRITON = find_spec("triton") is not None

if TRITON:
    from redrafter.kernels.attention import tree_attention
    from redrafter.kernels.beam import pick
    from redrafter.kernels.commit import commit
    from redrafter.kernels.linear import MOST_TOKENS, suits, thin_linear
    from redrafter.kernels.sample import draw, gumbel
    from redrafter.kernels.tree import ancestors
