"""Which models cannot be a target, and why: each reason in words of this library."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from redrafter.errors import ReDrafterError, UnsupportedError, first_line

__all__ = ["cache_layers", "check_positions", "explained", "head_width", "said_width", "tree_attentions"]


def explained(bind: Callable[..., None]) -> Callable[..., None]:
    """Wrap a target's `__init__(self, model)`: what a model's own code raises becomes an `UnsupportedError` that names
    the model. Memory that ran out is nobody's architecture, and passes."""

    @wraps(bind)
    def wrapped(self: Any, model: Any) -> None:
        try:
            bind(self, model)
        except (ReDrafterError, MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be a target: {type(error).__name__}: {first_line(error)}"
            ) from error

    return wrapped


def check_positions(model: Any, name: str) -> None:
    """Raise `UnsupportedError` for ALiBi, whose bias knows a token by its slot in a row and not by its position."""
    config = model.config.get_text_config(decoder=True)
    said = (getattr(each, "alibi", False) for each in (config, getattr(config, "attn_config", None)))
    if any(said) or hasattr(model.get_decoder(), "build_alibi_tensor"):
        raise UnsupportedError(
            f"{name} has ALiBi attention, whose bias follows from a token's slot in a 2-D mask; the nodes of a tree "
            "need positions of their own, so use a model with rotary or learned positions"
        )


def tree_attentions(model: Any) -> str:
    """Name the attention implementations that take a tree's mask and that the model is right with, for a message."""
    config = model.config.get_text_config(decoder=True)
    if not model._supports_sdpa or getattr(config, "attn_logit_softcapping", None) is not None:
        return "attn_implementation='eager'"
    return "attn_implementation='sdpa' (or 'eager')"


def cache_layers(output: Any, config: Any, name: str) -> Any:
    """Return the layers of the cache that a plain forward made. Raises `UnsupportedError` where it made none."""
    past: Any = getattr(output, "past_key_values", None)
    if hasattr(past, "layers"):
        return past.layers
    if past is None and getattr(config, "is_decoder", None) is False:
        raise UnsupportedError(f"{name} is no decoder: its tokens see those behind them; load it with is_decoder=True")
    kept = "no keys and values of past tokens" if past is None else f"past tokens in its {type(past).__name__}"
    raise UnsupportedError(f"{name} keeps {kept}; only models with an ordinary cache can be verified as a tree")


def head_width(head: nn.Module, config: Any) -> int:
    """Return D, the size of the hidden states that a model's head reads."""
    width = getattr(head, "in_features", None)
    return width if isinstance(width, int) else said_width(config)


def said_width(config: Any) -> int:
    """Return D as a config tells it: that of the layers, but where OPT projects what goes in and comes out of them."""
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size
