"""Names of number formats as config files, reports and messages write them, such as `bfloat16`."""

import torch

# Names of number formats in a file, from https://github.com/huggingface/safetensors, "Format".
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SAFETENSORS_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, e.g. `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
