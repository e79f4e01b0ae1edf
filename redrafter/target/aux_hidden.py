"""What a drafter may read of its target: the last hidden state, and the outputs of earlier layers beside it.

Reading several depths at once is how EAGLE-3 feeds its head (Li et al. 2025, arXiv 2503.01840).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from redrafter.errors import MismatchError, UnsupportedError

__all__ = ["decoder_layers", "decoder_stack", "join_hidden", "only_in_this_thread", "watch_outputs"]


def decoder_layers(model: PreTrainedModel, count: int, wanted: Sequence[int]) -> list[nn.Module]:
    """The `wanted` ones of a model's `count` decoder layers, numbered from 0.

    Raises `MismatchError` where there is no such layer, `UnsupportedError` where a model's layers cannot be found.
    """
    for index in wanted:
        if not 0 <= index < count:
            raise MismatchError(
                f"the drafter reads layer {index}; {type(model).__name__} has {count} layers, from 0 to {count - 1}"
            )
    if not wanted:
        return []
    stack = decoder_stack(model, count)
    if stack is None:
        raise UnsupportedError(
            f"{type(model).__name__} does not hold its {count} layers in a list, so a drafter cannot read them; "
            "use one without target_layers"
        )
    return [stack[index] for index in wanted]


def decoder_stack(model: PreTrainedModel, count: int) -> nn.ModuleList | None:
    """All `count` decoder layers of a model, where it holds them in a list."""
    decoder: nn.Module = model.get_decoder()  # what sees images or hears may have as many layers
    return next((each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count), None)


def join_hidden(last: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Join the last hidden state `[..., D]` and the outputs of layers, `[..., D]` each, to `[..., F]`, in the dtype of
    the last hidden state. F = (1 + layers) * D.

    Raises:
        UnsupportedError: a layer's output has another rank or width than the last hidden state.
    """
    for output in outputs:
        if output.dim() != last.dim() or output.shape[-1] != last.shape[-1]:
            raise UnsupportedError(
                f"a layer's output has the shape {list(output.shape)} and the last hidden state {list(last.shape)}: a "
                "drafter cannot read them together; use one without target_layers"
            )
    return torch.cat([last, *(x.to(last) for x in outputs)], dim=-1) if outputs else last


@contextmanager
def watch_outputs(modules: Sequence[nn.Module], see: Callable[[Tensor], None]) -> Iterator[None]:
    """Show every output of these layers to `see`, in their order, while the context lasts."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        see(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def only_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that forwards of other threads pass it by.

    A hook stands on a module, which all threads share; what it does is for one forward alone.
    """
    thread = threading.get_ident()

    @wraps(hook)
    def guarded(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return guarded
