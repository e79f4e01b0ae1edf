"""Names of number formats as config files, reports and messages write them, such as `bfloat16`."""

import torch

from redrafter.files.headers import DTYPE_NAMES

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPE_NAMES.items()}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, e.g. `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
