"""Recurrent layers in our forwards: over the nodes of trees level by level, over prompts row by row.

While a forward runs, each mixer of the model is called by a function of ours that cuts its input into calls of the
mixer's own forward, each on states of its own. In a tree, the nodes of one depth are the rows of one call of a single
token each, on the states after their parents: so each token goes the way that it goes in plain decoding. A prompt is
read whole from its row's state, without padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redrafter.attention.prompt_attention import Piece
from redrafter.cache.states import StatesOfRows
from redrafter.target.fused_linear import is_plain
from redrafter.target.mixers import Mixer
from redrafter.target.patch import ModelPatch
from redrafter.tree.token_tree import Tree

__all__ = ["MixerPlan", "PromptStates", "TreeStates", "mixer_plan", "replaced_mixers"]


class MixerPlan(ABC):
    """What the mixers must know of one forward."""

    @abstractmethod
    def run(self, mixer: Mixer, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Compute what a mixer returns for all tokens of the forward.

        Args:
            mixer: The mixer.
            forward: Its own forward.
            arguments: The arguments of its call, by name.
        """

    def finish(self) -> None:  # noqa: B027 -- most have nothing to do
        """Take note that the forward has ended."""


class TreeStates(MixerPlan):
    """A forward over the new nodes of trees: one call for each level."""

    def __init__(self, tree: Tree, length: Tensor, states: StatesOfRows, starts: Tensor | None = None):
        """Make room for the states after the nodes.

        Args:
            tree: The trees of B rows, M new nodes each.
            length: Tokens of each row before its root, `[B]` int64.
            states: States of the rows.
            starts: Index of the first node of each row among the tokens of the forward, `[B]` int64; None for M tokens
                a row.
        """
        self._states, self._levels = states, states.begin(tree, length)
        new, rows, nodes = tree.new, len(length), self._levels.nodes
        if starts is None:
            starts = torch.arange(rows, device=length.device) * new
        # Index of each node among the tokens of the forward, level by level, `[L * B * W]`; -1 for none.
        self._index = torch.where(nodes == new, -1, starts[:, None] + nodes).flatten()
        self._taken = self._index.clamp(min=0)

    def run(self, mixer: Mixer, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Compute what a mixer returns, level by level; see `MixerPlan`."""
        tokens, levels = _Tokens.of(arguments[mixer.tokens_argument]), self._levels
        keys, dtypes = [state.key for state in mixer.states], [state.dtype for state in mixer.states]
        parents, taken = levels.parents.to(tokens.device), self._taken.to(tokens.device)
        states = self._states.read_entries(keys, levels.roots)
        outputs, after = [], []
        with _OuterLinears(mixer, arguments, taken, len(parents)) as linears:
            for level, given in enumerate(tokens.take_levels(arguments, taken, len(parents))):
                if level:  # which also copies: a mixer may write to what it is given
                    states = [state.index_select(0, parents[level]) for state in states]
                linears.take(level)
                output, states = mixer.run(forward, given, states)
                states = [state.to(dtype) for state, dtype in zip(states, dtypes, strict=True)]
                outputs.append(output)
                after.append(states)
            self._states.write_entries(keys, levels.entries, map(torch.cat, zip(*after, strict=True)))
        return linears.finish(tokens.join(self._index.to(tokens.device), outputs))


class _OuterLinears:
    """A context in which the first and last linear layers of a mixer are computed once, for the tokens of all levels.

    Their weights are read once then. The first ones hand out what they computed, a level at a time, and the last one
    hands on what it is given, until all of it is there.
    """

    def __init__(self, mixer: Mixer, arguments: Mapping[str, Any], index: Tensor, levels: int):
        """Compute the first linear layers of a mixer's call.

        Args:
            mixer: The mixer.
            arguments: The arguments of its call, by name.
            index: The tokens of all levels among those of the call, `[L * R]` int64.
            levels: L.
        """
        x, last = arguments[mixer.tokens_argument], mixer.last_linear
        # A layer that was given a hook since the model was bound is called by the mixer, as any other layer in it.
        self._first = [layer for name in mixer.first_linears if is_plain(layer := mixer.module.get_submodule(name))]
        self._last = layer if last is not None and is_plain(layer := mixer.module.get_submodule(last)) else None
        self._outputs = [_rows_of(linear(x), index).chunk(levels) for linear in self._first]
        self._level = 0
        self._patch = ModelPatch()

    def __enter__(self) -> "_OuterLinears":
        for linear, outputs in zip(self._first, self._outputs, strict=True):
            self._patch.replace_forward(linear, lambda *_, outputs=outputs: outputs[self._level])
        if self._last is not None:
            self._patch.replace_forward(self._last, lambda _, args, __: args[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.__exit__()

    def take(self, level: int) -> None:
        """Let the first layers hand out what they computed for the tokens of a level."""
        self._level = level

    def finish(self, output: Any) -> Any:
        """Return what the mixer returns for all tokens, from what the last layer was given for them."""
        return output if self._last is None else self._last(output)


class PromptStates(MixerPlan):
    """A forward over pieces of prompts: one call for each."""

    def __init__(self, pieces: Sequence[Piece], starts: Sequence[int], states: StatesOfRows | None):
        """Plan a forward over pieces of prompts.

        Args:
            pieces: What is read of each row, a token at least; the rows' states are replaced.
            starts: Index of the first token of each piece among the tokens of the forward.
            states: States of the rows; None for whole texts whose states nobody needs.
        """
        self._pieces, self._starts, self._states = pieces, starts, states

    def run(self, mixer: Mixer, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Compute what a mixer returns, row by row; see `MixerPlan`."""
        tokens = _Tokens.of(arguments[mixer.tokens_argument])
        outputs, read = [], []
        for piece, start in zip(self._pieces, self._starts, strict=True):
            states = None
            if piece.first and self._states is not None:
                states = self._states.read_row(mixer.states, piece.row)
            step = piece.count if states is None or mixer.continues else 1
            for first in range(start, start + piece.count, step):
                index = torch.arange(first, first + step, device=tokens.device)
                output, states = mixer.run(forward, tokens.take_run(arguments, index), states)
                outputs.append(pytree.tree_map(_as_rows, output))
                read.append(index)
            if self._states is not None and states is not None:
                self._states.write_row(mixer.states, piece.row, states)
        return tokens.join(torch.cat(read), outputs)

    def finish(self) -> None:
        """Take note that the rows have read their pieces."""
        if self._states is not None:
            self._states.take_note([piece.row for piece in self._pieces], [piece.end for piece in self._pieces])


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a mixer's call, `rows` times `count` of them.

    Attributes:
        rows: First size of what is given for each token.
        count: Second size of it.
        device: Where they are.
    """

    rows: int
    count: int
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "_Tokens":
        """Return the tokens that `[B, T, D]` are vectors of."""
        return cls(x.shape[0], x.shape[1], x.device)

    def take_levels(self, arguments: Mapping[str, Any], index: Tensor, levels: int) -> list[dict[str, Any]]:
        """Return the arguments for the tokens of each level, each token in a row of its own.

        Args:
            arguments: The arguments for all tokens.
            index: The tokens of all levels, `[L * R]` int64.
            levels: L.
        """
        leaves, kinds = pytree.tree_flatten(_without_masks(arguments))
        by_leaf = [
            _rows_of(self._expanded(leaf), index).chunk(levels) if self._per_token(leaf) else [leaf] * levels
            for leaf in leaves
        ]
        return [pytree.tree_unflatten(list(level), kinds) for level in zip(*by_leaf, strict=True)]

    def take_run(self, arguments: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
        """Return the arguments for successive tokens of one row. index: `[R]` int64."""

        def taken(leaf: Any) -> Any:
            return self._expanded(leaf).flatten(0, 1).index_select(0, index)[None] if self._per_token(leaf) else leaf

        return pytree.tree_map(taken, _without_masks(arguments))

    def _per_token(self, leaf: Any) -> bool:
        """Tell whether an argument has something for each token."""
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return False
        return leaf.shape[1] == self.count and leaf.shape[0] in (1, self.rows)

    def _expanded(self, leaf: Tensor) -> Tensor:
        """Return what is given for each token, `[rows, count, ...]`, which may be given for all rows at once."""
        return leaf.expand(self.rows, *leaf.shape[1:])

    def join(self, index: Tensor, outputs: Sequence[Any]) -> Any:
        """Return one output of all tokens.

        Args:
            index: Indices of tokens in the order of the outputs, `[R]` int64, -1 for none.
            outputs: What was returned for some of them each, `[R', 1, ...]`.
        """
        leaves, kinds = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
        joined = [self._join(index, parts) for parts in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, kinds[0])

    def _join(self, index: Tensor, parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        size = self.rows * self.count
        whole = torch.cat(list(parts)).squeeze(1)
        joined = whole.new_zeros(size + 1, *whole.shape[1:])
        joined[index] = whole  # -1 is the one that is cut off
        return joined[:size].unflatten(0, (self.rows, self.count))


def _without_masks(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without masks of padding, of which there is none."""
    return {name: None if "mask" in name else value for name, value in arguments.items()}


def _rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Return what is given for the tokens at `index` `[R]`, of `[B, T, ...]`, each in a row of its own."""
    return x.flatten(0, 1).index_select(0, index)[:, None]


def _as_rows(x: Any) -> Any:
    """Return what is given for the tokens of one row, `[1, T, ...]`, as `[T, 1, ...]`."""
    return x.transpose(0, 1) if isinstance(x, Tensor) else x


def mixer_plan(tree: Tree, length: Tensor, states: StatesOfRows, pieces: Sequence[Piece] | None) -> MixerPlan:
    """Return what the mixers must know of a forward over the new nodes of trees, or over chains of prompts.

    Args:
        tree: The trees of B rows; of prompts, chains.
        length: Tokens of each row before its root, `[B]` int64.
        states: States of the rows.
        pieces: What is read of prompts; None for trees.
    """
    if pieces is None:
        return TreeStates(tree, length, states, None if tree.counts is None else tree.row_starts()[:-1])
    counts = [tree.new] * len(length) if tree.counts is None else tree.counts.tolist()
    starts = [0, *accumulate(counts)]
    return PromptStates(pieces, [starts[piece.row] for piece in pieces], states)


@contextmanager
def replaced_mixers(mixers: Sequence[Mixer], plan: MixerPlan) -> Iterator[None]:
    """Let a plan compute what mixers return inside the context, in this thread alone."""
    with ModelPatch() as patch:
        for mixer in mixers:

            def run(forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mixer: Mixer = mixer) -> Any:
                return plan.run(mixer, forward, mixer.named(args, kwargs))

            patch.replace_forward(mixer.module, run)
        yield
    plan.finish()
