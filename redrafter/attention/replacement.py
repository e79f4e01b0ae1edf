"""Our attention functions in the place of the one that a model was loaded with: `eager`, which caps scores, or `sdpa`.

A model hands the cap of its config to whatever attention it has, and `sdpa` can cap nothing. Before version 5.21,
transformers loads Gemma 2 with `sdpa` all the same and passes the cap over, so `model.generate` writes what uncapped
scores give; what takes the place of `sdpa` must write that too.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["register_attention", "replacement_for"]


def register_attention(
    name: str, attention: Callable[..., tuple[Tensor, None]], mask: Callable[..., Tensor | None] | None = None
) -> None:
    """Register an attention function with transformers, once as it is and once capping nothing.

    Args:
        name: Name of the function, which `replacement_for` is given. One that holds "sdpa" or "flash" would make
            transformers check for those.
        attention: The function, which takes `softcap` as a keyword.
        mask: Makes its masks; None where it reads none.
    """

    @wraps(attention)
    def uncapped(*args: Any, softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        return attention(*args, **kwargs)

    for registered, function in ((name, attention), (_uncapped(name), uncapped)):
        AttentionInterface.register(registered, function)
        if mask is not None:
            AttentionMaskInterface.register(registered, mask)


def replacement_for(loaded: str, name: str) -> str:
    """Return the name under which a registered function computes what a model's own attention does.

    Args:
        loaded: The attention that the model was loaded with.
        name: Name of the function in `register_attention`.
    """
    return _uncapped(name) if loaded == "sdpa" else name


def _uncapped(name: str) -> str:
    return f"{name}_uncapped"
