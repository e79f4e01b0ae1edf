"""Names of number formats as config files, reports and messages write them, such as `bfloat16`."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, e.g. `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
