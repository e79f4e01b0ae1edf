"""Find the mixers of a model in one plain forward, and try them apart.

What mixers call their states, and how many there are, differs between architectures. So the forward is watched: a mixer
is the innermost module that was handed the cache and left tensors in it; its states are those tensors.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, cache_utils

from redrafter.cache.states import StateKey, StateShape
from redrafter.errors import UnsupportedError
from redrafter.target.fused_linear import linear_calls
from redrafter.target.mixers import Mixer, copied_layer, layer_tensors, layer_without_tensors
from redrafter.target.patch import ModelPatch

__all__ = ["cache_argument", "find_mixers"]

_RECURRENT: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())  # an older release has none


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument by which a model is given a cache, or None where it takes none."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in names), None)


def find_mixers(model: Any, config: Any, ids: Tensor, name: str) -> list[Mixer]:
    """Return the modules of a model that keep recurrent states.

    Args:
        model: A causal LM of transformers.
        config: The config of its decoder.
        ids: Any text of four tokens at least, `[T]` int64.
        name: What to call the model.

    Raises:
        UnsupportedError: A module keeps states in a way that is not known, or goes on from them wrongly.
    """
    argument = cache_argument(model)
    cache = DynamicCache(config=config)
    if argument is None or not any(isinstance(layer, _RECURRENT) for layer in cache.layers):
        return []
    watch = _Watch(cache, len(ids), {index: copied_layer(layer) for index, layer in enumerate(cache.layers)})
    with ModelPatch() as patch:
        for module in model.modules():
            patch.hook(module, watch.after_call, with_kwargs=True)
        model(input_ids=ids[None], use_cache=True, **{argument: cache})
    return [_tried(call, cache, len(ids), name) for call in watch.calls]


@dataclass(frozen=True)
class _Call:
    """A call of a mixer that was seen. `mixer.full` is the layer that it began with."""

    mixer: Mixer
    given: Mapping[str, Any]
    returned: Any


@dataclass
class _Watch:
    """What is seen of the modules of a model in one plain forward.

    Attributes:
        cache: The cache that the model is given.
        count: Tokens of the forward.
        empty: Its layers before the forward.
        calls: The calls of mixers.
    """

    cache: Cache
    count: int
    empty: Mapping[int, Any]
    calls: list[_Call] = field(default_factory=list)
    _known: set[StateKey] = field(default_factory=set)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take note of a module that has left new tensors in the cache. Modules inside it were called before."""
        parameters = tuple(inspect.signature(module.forward).parameters)
        given = dict(zip(parameters, args, strict=False)) | kwargs
        handed = [name for name, value in given.items() if value is self.cache]
        left = self._left() if handed else []
        if not left:
            return
        self._known |= {state.key for state in left}
        layer = left[0].layer
        vectors = [name for name, x in given.items() if isinstance(x, Tensor) and x.shape[1:-1] == (self.count,)]
        if any(state.layer != layer for state in left) or not vectors:
            raise UnsupportedError(
                f"its {type(module).__name__} keeps states in a way that is not known, so they cannot be rolled back "
                "to a branch of a tree"
            )
        names, empty = (parameters, frozenset(given), handed[0], vectors[0]), self.empty[layer]
        self.calls.append(_Call(Mixer(module, layer, tuple(left), *names, empty, empty), given, output))

    def _left(self) -> list[StateShape]:
        """Return the states in the cache that no module is known to have left there."""
        return [
            StateShape(index, name, tuple(x.shape[1:]), x.dtype, x.device)
            for index, layer in enumerate(self.cache.layers)
            if isinstance(layer, _RECURRENT)
            for name, x in layer_tensors(layer).items()
            if (index, name) not in self._known
        ]


def _tried(call: _Call, cache: Cache, count: int, name: str) -> Mixer:
    """Return a mixer that was tried apart from the model: half of the tokens at once, then the others both ways.

    Args:
        call: Its call in a plain forward of one row.
        cache: The cache of that forward.
        count: Tokens of the forward.
        name: What to call the model.

    Raises:
        UnsupportedError: It goes on from its states wrongly, one token at a time.
    """
    mixer, half = replace(call.mixer, full=layer_without_tensors(cache.layers[call.mixer.layer])), count // 2
    forward, expected = mixer.module.forward, _part({"": call.returned}, half, count, count)[""]
    begun = _part(call.given, 0, half, count)
    with linear_calls(mixer.module) as linears:
        output, states = mixer.run(forward, begun, None)
    first, last = _outer_linears(linears, begun[mixer.tokens_argument], output)
    later, parts = [state.clone() for state in states], []
    for token in range(half, count):
        part, states = mixer.run(forward, _part(call.given, token, token + 1, count), states)
        parts.append(part)
    one_by_one = pytree.tree_map(lambda *x: torch.cat(x, dim=1) if isinstance(x[0], Tensor) else x[0], *parts)
    if not _close(one_by_one, expected, _ONE_BY_ONE):
        raise UnsupportedError(
            f"layer {mixer.layer} of {name} ({type(mixer.module).__name__}) goes on from its state with other numbers "
            "than it reads a whole text with; this architecture cannot be verified exactly"
        )
    at_once, _ = mixer.run(forward, _part(call.given, half, count, count), later)
    continues = _close(at_once, expected, _AT_ONCE)
    return replace(mixer, continues=continues, first_linears=first, last_linear=last)


def _outer_linears(
    calls: Sequence[tuple[str, Tensor, Tensor]], tokens: Tensor, output: Any
) -> tuple[tuple[str, ...], str | None]:
    """Return which linear layers of a mixer read its tokens as they are, and which one's output it returns.

    A layer that is called twice is none of them, nor is one that is both.

    Args:
        calls: Name, input and output of each call.
        tokens: What the mixer was given of its tokens.
        output: What it returned.
    """
    names = [name for name, _, _ in calls]
    once = [call for call in calls if names.count(call[0]) == 1 and call[2] is not call[1]]
    first = tuple(name for name, given, returned in once if given is tokens and returned is not output)
    last = next((name for name, given, returned in once if returned is output and given is not tokens), None)
    return first, last


def _part(given: Mapping[str, Any], first: int, end: int, count: int) -> dict[str, Any]:
    """Return the arguments of a call of one row for some of its `count` tokens, without masks: there is no padding."""

    def cut(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[:2] == (1, count)
        return value[:, first:end] if per_token else value

    return {name: None if "mask" in name else pytree.tree_map(cut, value) for name, value in given.items()}


# What may differ, of the largest number of an output. Where a module clamps in one way of reading and not in the other,
# as some of transformers do, it is a hundredth; a state that is wrong makes it near to 1.
_ONE_BY_ONE, _AT_ONCE = 0.1, 2e-3
_HALF_ROUNDING = 0.1


def _close(found: Any, expected: Any, part: float) -> bool:
    """Tell whether two outputs differ by no more than a part of the largest number, or by half-precision rounding."""
    leaves = zip(*(pytree.tree_leaves(x) for x in (found, expected)), strict=True)
    return all(
        float((a.float() - b.float()).abs().max())
        <= (part if a.dtype == torch.float32 else _HALF_ROUNDING) * float(b.abs().max())
        for a, b in leaves
        if isinstance(a, Tensor)
    )
