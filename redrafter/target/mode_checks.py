"""Refuse modes of models and of torch that would change the text: training mode and autocast."""

import torch
from torch import nn

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.files.dtype_names import dtype_name

__all__ = ["check_autocast", "check_eval"]


def check_eval(*models: nn.Module) -> None:
    """Check that models are in eval mode; in training mode, dropout would change the text.

    Raises:
        ArgumentError: A part of a model is in training mode; the message names the first one.
    """
    for model in models:
        if not any(module.training for module in model.modules()):
            continue
        part = next(name for name, module in model.named_modules() if module.training)
        where = f" (its {part})" if part else ""
        raise ArgumentError(
            f"{type(model).__name__} is in training mode{where}, where dropout draws at random; call model.eval() first"
        )


def check_autocast(device: torch.device) -> None:
    """Check that `torch.autocast` is off on a device; it would change the dtype of keys and values on the way.

    Raises:
        UnsupportedError: It is on.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = dtype_name(torch.get_autocast_dtype(device.type))
        raise UnsupportedError(
            f"a model cannot be verified under torch.autocast; leave it, and load the model with dtype={dtype!r}"
        )
