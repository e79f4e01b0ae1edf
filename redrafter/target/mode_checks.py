"""What a call finds the models in, beside its arguments: modes that would change the text are refused."""

import torch
from torch import nn

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.dtype_names import dtype_name

__all__ = ["check_autocast", "check_eval"]


def check_eval(*models: nn.Module) -> None:
    """Raise `ArgumentError` naming a part of a model that is in training mode, where dropout would change the text."""
    for model in models:
        if not any(module.training for module in model.modules()):
            continue
        part = next(name for name, module in model.named_modules() if module.training)
        where = f" (its {part})" if part else ""
        raise ArgumentError(
            f"{type(model).__name__} is in training mode{where}, where dropout draws at random; call model.eval() first"
        )


def check_autocast(device: torch.device) -> None:
    """Raise `UnsupportedError` under `torch.autocast`, in which keys and values change their dtype on the way."""
    if torch.is_autocast_enabled(device.type):
        dtype = dtype_name(torch.get_autocast_dtype(device.type))
        raise UnsupportedError(
            f"a model cannot be verified under torch.autocast; leave it, and load the model with dtype={dtype!r}"
        )
