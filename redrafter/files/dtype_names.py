"""Names of number formats as config files, reports and messages write them, such as `bfloat16`."""

import torch

from redrafter.errors import ArgumentError
from redrafter.files.headers import DTYPE_NAMES
from redrafter.options import dtype_word

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPE_NAMES.items()}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, e.g. `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def known_dtype(text: str) -> str:
    """Return the name of a dtype that weights can have, for any of its spellings; raise `ArgumentError` for others."""
    name = dtype_word(text)
    if name not in ("auto", "float32", "bfloat16", "float16", "float64"):
        eight_bits = "; 8-bit weights are quantization='fp8'" if "8" in name else ""
        raise ArgumentError(f"dtype={text!r} is none of auto, float32, bfloat16 and float16{eight_bits}")
    return name
