"""Recurrent layers in our forwards: over the nodes of trees level by level, over prompts row by row.

A mixer combines a token with earlier ones by a convolution or a recurrence instead of attention. It reads its states
from transformers' cache, and writes the new ones there. To run it on other states, it receives a cache with a copy of
its layer in which the tensors are replaced; so nothing here depends on the names that a release of transformers gives
to them.

During a forward, each mixer of the model is called by a function of ours that splits its input into calls of the
mixer's own forward, each with its own states. In a tree, the nodes of one depth are the rows of one call with a single
token each, on the states after their parents: so each token is computed as in undrafted decoding. A prompt is read
whole from its row's state, without padding.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Cache

from redrafter.attention.prompt_attention import Piece
from redrafter.cache.states import StateName, StateShape, StatesOfRows
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.linear_layers import is_unmodified_linear
from redrafter.model.patch import ModelPatch
from redrafter.tree.token_tree import Tree

_OF_ATTENTION = ("keys", "values")  # attributes of a layer that also attends


@dataclass(frozen=True)
class Mixer:
    """A module that keeps recurrent states.

    Attributes:
        module: The module.
        layer: Index of its layer of the cache.
        states: The states that it keeps.
        parameters: Names of its forward's parameters, in order.
        arguments: Names of the arguments that the model passes.
        cache_argument: Name of the argument for the cache.
        tokens_argument: Name of the argument with a vector of each token, `[B, T, D]`.
        empty: Its cache layer before any token.
        full: Its cache layer after some tokens, without the tensors.
        continues: Whether it reads several tokens at once from a state correctly. All mixers do without a state, and
            one token at a time; some ignore the state when they read several tokens.
        first_linears: Names of its linear layers that read the tokens' vectors unchanged, in the order of their calls.
        last_linear: Name of its linear layer whose output it returns; None if there is none.
        tokens_alone: Whether it returns one vector per token, and needs only the tokens and its states.
    """

    module: nn.Module
    layer: int
    states: tuple[StateShape, ...]
    parameters: tuple[str, ...]
    arguments: frozenset[str]
    cache_argument: str
    tokens_argument: str
    empty: object
    full: object
    continues: bool = False
    first_linears: tuple[str, ...] = ()
    last_linear: str | None = None
    tokens_alone: bool = False

    def named(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by name, without what the model gives it in our forwards alone."""
        named = dict(zip(self.parameters, args, strict=False)) | dict(kwargs)
        return {name: value for name, value in named.items() if name in self.arguments}

    def run_forward(
        self, forward: Callable[..., object], arguments: Mapping[str, object], states: Sequence[Tensor] | None
    ) -> tuple[Any, list[Tensor]]:
        """Call the module's own `forward` on some states; return its output, and its states after the last token.

        Args:
            forward: The module's forward.
            arguments: Its arguments by name; the cache is replaced.
            states: States to continue from, `[B, ...]` each, in the order of `self.states`; may be changed in place.
                None to begin with the first token of a sequence.
        """
        layer = copied_layer(self.empty if states is None else self.full)
        for shape, state in zip(self.states, states or (), strict=bool(states)):
            _put(layer, shape.name, state)
        cache = Cache(layers=[layer] * (self.layer + 1))
        output = forward(**{**arguments, self.cache_argument: cache})
        after = layer_tensors(layer)
        return output, [after[shape.name] for shape in self.states]


def layer_tensors(layer: object) -> dict[StateName, Tensor]:
    """Return the states that a layer of the cache holds."""
    found: dict[StateName, Tensor] = {}
    for attribute, value in vars(layer).items():
        if attribute in _OF_ATTENTION:
            continue
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found |= {(attribute, index): x for index, x in items if isinstance(x, Tensor)}
        if isinstance(value, Tensor) and value.dim():  # 0-dim tensors are counters
            found[attribute, None] = value
    return found


def copied_layer(layer: object) -> Any:
    """Return a layer of the cache of its own, which holds the same tensors."""
    copied = copy.copy(layer)
    for attribute, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(copied, attribute, copy.copy(value))
    return copied


def layer_without_tensors(layer: object) -> object:
    """Return a layer of the cache that says of itself what this one does, but holds no tensors."""
    bare = copied_layer(layer)
    for name in layer_tensors(layer):
        _put(bare, name, None)
    for attribute in _OF_ATTENTION:
        if hasattr(bare, attribute):
            setattr(bare, attribute, None)
    return bare


def _put(layer: object, name: StateName, state: Tensor | None) -> None:
    """Replace a state in a layer of the cache."""
    attribute, index = name
    if index is None:
        setattr(layer, attribute, state)
    else:
        getattr(layer, attribute)[index] = state


class TreeStates:
    """A forward over the new nodes of trees: one call of each mixer for each level."""

    def __init__(self, tree: Tree, length: Tensor, states: StatesOfRows, starts: Tensor | None = None):
        """Allocate the states after the nodes.

        Args:
            tree: The trees of B rows, M new nodes each.
            length: Tokens of each row before its root, `[B]` int64.
            states: States of the rows.
            starts: Index of the first node of each row among the tokens of the forward, `[B]` int64; None for M tokens
                per row.
        """
        self._states, self._levels = states, states.begin(tree, length)
        new, rows, nodes = tree.new, len(length), self._levels.nodes
        if starts is None:
            starts = torch.arange(rows, device=length.device) * new
        # Index of each node among the tokens of the forward, level by level, `[L * B * W]`; -1 for missing nodes.
        self._index = torch.where(nodes == new, -1, starts[:, None] + nodes).flatten()
        self._taken = self._index.clamp(min=0)

    def run_mixer(self, mixer: Mixer, forward: Callable[..., object], arguments: Mapping[str, Any]) -> object:
        """Compute what a mixer returns for all tokens of a call of its forward, level by level."""
        x = arguments[mixer.tokens_argument]
        tokens, levels = MixerTokens(x), self._levels
        keys = [state.key for state in mixer.states]
        dtypes = [state.dtype for state in mixer.states]
        parents, taken = levels.parents.to(x.device), self._taken.to(x.device)
        states = self._states.read_entries(keys, levels.roots)
        outputs, after = [], []
        # The first and last linear layers are computed once for the tokens of all levels, so that their weights are
        # read once: replacements of the first ones return one level at a time, and the last one's returns its input,
        # until all levels are there. A layer that received a hook since the model was bound is called at each level.
        inner = mixer.module.get_submodule
        first = [layer for name in mixer.first_linears if is_unmodified_linear(layer := inner(name))]
        last = inner(mixer.last_linear) if mixer.last_linear is not None else None
        last = last if last is not None and is_unmodified_linear(last) else None
        with ModelPatch() as patch:
            for linear in first:
                by_level = iter(linear(x).flatten(0, 1).index_select(0, taken)[:, None].chunk(len(parents)))
                patch.replace_forward(linear, lambda *_, by_level=by_level: next(by_level))
            if last is not None:
                patch.replace_forward(last, lambda _, args, __: args[0])
            for level, given in enumerate(tokens.take_levels(arguments, taken, len(parents))):
                if level:  # selecting also copies, as a mixer may write to its arguments
                    states = [state.index_select(0, parents[level]) for state in states]
                output, states = mixer.run_forward(forward, given, states)
                states = [state.to(dtype) for state, dtype in zip(states, dtypes, strict=True)]
                outputs.append(output)
                after.append(states)
            self._states.write_entries(keys, levels.entries, map(torch.cat, zip(*after, strict=True)))
        joined = tokens.join(self._index.to(x.device), outputs)
        return joined if last is None else last(joined)

    def finish(self) -> None:
        """Do nothing: the rows' states stay unchanged until a path is committed."""


class PromptStates:
    """A forward over pieces of prompts, with one call of each mixer for each piece."""

    def __init__(self, pieces: Sequence[Piece], states: StatesOfRows | None, width: int | None = None):
        """Plan a forward over pieces of prompts.

        Args:
            pieces: Tokens to read of each row, at least one; the rows' states are replaced.
            states: States of the rows; None for whole sequences whose states are not needed.
            width: Number of tokens of each row in the forward, its piece's first; None for a forward without padding.
        """
        self._pieces, self._states = pieces, states
        # Index of the first token of each piece among the tokens of the forward.
        counts = accumulate((piece.count for piece in pieces), initial=0)
        self._starts = list(counts)[:-1] if width is None else [piece.row * width for piece in pieces]

    def run_mixer(self, mixer: Mixer, forward: Callable[..., object], arguments: Mapping[str, Any]) -> object:
        """Compute what a mixer returns for all tokens of a call of its forward, row by row."""
        x = arguments[mixer.tokens_argument]
        tokens = MixerTokens(x)
        outputs, read = [], []
        for piece, start in zip(self._pieces, self._starts, strict=True):
            states, snapshots, first = None, dict[int, int](), piece.first
            if self._states is not None:
                states = self._states.read_row(mixer.states, piece.row) if first else None
                snapshots = self._states.snapshots_in(piece)
            while first < piece.end:
                # A snapshot splits only the calls of the mixers: all other layers read the piece at once.
                end = min((count for count in snapshots if count > first), default=piece.end)
                # Some mixers ignore their state when they read several tokens: these read one at a time.
                step = end - first if states is None or mixer.continues else 1
                index = start - piece.first + torch.arange(first, first + step, device=tokens.device)
                output, states = mixer.run_forward(forward, tokens.take_run(arguments, index), states)
                # Of the tokens of one row, `[1, T, ...]`, each becomes a row of its own.
                outputs.append(pytree.tree_map(lambda x: x.transpose(0, 1) if isinstance(x, Tensor) else x, output))
                read.append(index)
                first += step
                if self._states is not None and first in snapshots:
                    self._states.write_snapshot(mixer.states, snapshots[first], states)
            if self._states is not None and states is not None:
                self._states.write_row(mixer.states, piece.row, states)
        return tokens.join(torch.cat(read), outputs)

    def finish(self) -> None:
        """Record that the rows have read their pieces."""
        if self._states is not None:
            self._states.take_note(self._pieces)


class MixerTokens:
    """Describes the tokens of a mixer's call: B, T and the device of their vectors `[B, T, D]`."""

    def __init__(self, x: Tensor):
        self.rows, self.count, self.device = x.shape[0], x.shape[1], x.device

    def _flat(self, leaf: object) -> Tensor | None:
        """Return an argument of all tokens, maybe broadcast over the rows, as `[rows * count, ...]`; else None."""
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return None
        if leaf.shape[1] != self.count or leaf.shape[0] not in (1, self.rows):
            return None
        return leaf.expand(self.rows, *leaf.shape[1:]).flatten(0, 1)

    def take_levels(self, arguments: Mapping[str, object], index: Tensor, levels: int) -> list[dict[str, object]]:
        """Return the arguments for the tokens `index` `[L * R]` of L levels, each token in a row of its own."""
        leaves, kinds = pytree.tree_flatten(_without_masks(arguments))
        by_leaf = [
            [leaf] * levels if flat is None else flat.index_select(0, index)[:, None].chunk(levels)
            for leaf, flat in zip(leaves, map(self._flat, leaves), strict=True)
        ]
        return [pytree.tree_unflatten(list(level), kinds) for level in zip(*by_leaf, strict=True)]

    def take_run(self, arguments: Mapping[str, object], index: Tensor) -> dict[str, Any]:
        """Return the arguments for successive tokens of one row. index: `[R]` int64."""

        def taken(leaf: object) -> object:
            flat = self._flat(leaf)
            return leaf if flat is None else flat.index_select(0, index)[None]

        return pytree.tree_map(taken, _without_masks(arguments))

    def join(self, index: Tensor, outputs: Sequence[object]) -> object:
        """Return one output of all tokens.

        Args:
            index: Indices of tokens in the order of the outputs, `[R]` int64, -1 for missing ones.
            outputs: Outputs for some of the tokens, `[R', 1, ...]` each.
        """
        size = self.rows * self.count

        def join(*parts: Any) -> object:
            if not isinstance(parts[0], Tensor):
                return parts[0]
            whole = torch.cat(parts).squeeze(1)
            joined = whole.new_zeros(size + 1, *whole.shape[1:])
            joined[index] = whole  # -1 is the last entry, which is cut off
            return joined[:size].unflatten(0, (self.rows, self.count))

        return pytree.tree_map(join, *outputs)


def _without_masks(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments without masks of padding, of which there is none."""
    return {name: None if "mask" in name else value for name, value in arguments.items()}


def mixer_plan(batch: ForwardBatch, *, padded: bool) -> TreeStates | PromptStates:
    """Return the plan of the mixers for a forward over the new nodes of trees, or over pieces of prompts.

    A padded forward computes M nodes of every row, also of a ragged tree.
    """
    tree, states, pieces = batch.tree, batch.cache.states, batch.pieces
    assert states is not None, "a model with mixers has states"
    ragged = tree.counts is not None and not padded
    if pieces is None:
        return TreeStates(tree, batch.length, states, tree.row_starts[:-1] if ragged else None)
    return PromptStates(pieces, states, None if ragged else tree.new)


def replace_mixers(patch: ModelPatch, mixers: Sequence[Mixer], plan: TreeStates | PromptStates) -> None:
    """Let a plan compute the outputs of mixers, in this thread only. Call the plan's `finish` after the forward."""
    for mixer in mixers:

        def run_with_plan(forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mixer: Mixer = mixer) -> object:
            return plan.run_mixer(mixer, forward, mixer.named(args, kwargs))

        patch.replace_forward(mixer.module, run_with_plan)
