"""Mixers: modules that keep recurrent states in transformers' cache, called on states of our own.

A mixer mixes a token with those before it by a convolution or a recurrence instead of attention. It asks the cache for
the states that it left there, and leaves the new ones. To call it on other states, it is handed a cache with a copy of
its layer in which the tensors are replaced; so nothing here depends on what a release of transformers calls them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from redrafter.cache.states import StateName, StateShape

__all__ = ["Mixer", "copied_layer", "layer_tensors", "layer_without_tensors"]

_OF_ATTENTION = ("keys", "values")  # what a layer holds that attends besides


@dataclass(frozen=True)
class Mixer:
    """A module that keeps recurrent states.

    Attributes:
        module: The module.
        layer: Index of its layer of the cache.
        states: The states that it keeps.
        parameters: Names of what its forward takes, in order.
        arguments: Names of what the model gives it.
        cache_argument: The one of them that is the cache.
        tokens_argument: The one of them that is a vector of each token, `[B, T, D]`.
        empty: Its layer of the cache before any token.
        full: The same after some tokens, without the tensors.
        continues: Whether it reads several tokens at once from a state rightly. All do from none, and one token at a
            time; some recurrences read several as if none came before them.
        first_linears: Names of the linear layers in it that read the vectors of the tokens as they are, in the order of
            their calls.
        last_linear: Name of the linear layer in it whose output it returns; None where that is none.
    """

    module: nn.Module
    layer: int
    states: tuple[StateShape, ...]
    parameters: tuple[str, ...]
    arguments: frozenset[str]
    cache_argument: str
    tokens_argument: str
    empty: Any
    full: Any
    continues: bool = False
    first_linears: tuple[str, ...] = ()
    last_linear: str | None = None

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without what the model gives it in our forwards alone."""
        named = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        return {name: value for name, value in named.items() if name in self.arguments}

    def run(
        self, forward: Callable[..., Any], arguments: Mapping[str, Any], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        """Call the module's own forward on some states.

        Args:
            forward: The module's forward.
            arguments: Its arguments by name; the one for the cache is replaced.
            states: What it goes on from, `[B, ...]` each, in the order of `self.states`; may be changed in place. None
                to begin with the first token of a text.

        Returns:
            What the module returns, and its states after the last token.
        """
        layer = copied_layer(self.empty if states is None else self.full)
        for shape, state in zip(self.states, states or (), strict=bool(states)):
            _put(layer, shape.name, state)
        cache = Cache(layers=[layer] * (self.layer + 1))
        output = forward(**{**arguments, self.cache_argument: cache})
        after = layer_tensors(layer)
        return output, [after[shape.name] for shape in self.states]


def layer_tensors(layer: Any) -> dict[StateName, Tensor]:
    """Return the states that a layer of the cache holds."""
    found: dict[StateName, Tensor] = {}
    for attribute, value in vars(layer).items():
        if attribute in _OF_ATTENTION:
            continue
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found |= {(attribute, index): x for index, x in items if isinstance(x, Tensor)}
        if isinstance(value, Tensor) and value.dim():  # a number is none
            found[attribute, None] = value
    return found


def copied_layer(layer: Any) -> Any:
    """Return a layer of the cache of its own, which holds the same tensors."""
    copied = copy.copy(layer)
    for attribute, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(copied, attribute, copy.copy(value))
    return copied


def layer_without_tensors(layer: Any) -> Any:
    """Return a layer of the cache that says of itself what this one does, but holds no tensors."""
    bare = copied_layer(layer)
    for name in layer_tensors(layer):
        _put(bare, name, None)
    for attribute in _OF_ATTENTION:
        if hasattr(bare, attribute):
            setattr(bare, attribute, None)
    return bare


def _put(layer: Any, name: StateName, state: Tensor | None) -> None:
    """Replace a state in a layer of the cache."""
    attribute, index = name
    if index is None:
        setattr(layer, attribute, state)
    else:
        getattr(layer, attribute)[index] = state
