"""Triton kernels for the GPU, each tested against a slow reference in plain torch.

`TRITON` is true if Triton is installed, so that the modules with kernels can be imported; otherwise callers use the
references.
"""

from importlib.util import find_spec

TRITON = find_spec("triton") is not None

if TRITON:
    from redrafter.kernels import (  # noqa: F401 -- attributes, by which callers name kernels
        accept,
        attention,
        cache_tiles,
        cuda,
        float8_matmul,
        float8_rounding,
        launch,
        linear,
        ordered_attention,
        ordered_linear,
        peer_sum,
        recycled,
        sample,
        token_order,
        tree,
        widen_groups,
    )
