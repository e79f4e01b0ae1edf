"""Inputs and outputs of a forward: rows of tokens with ancestors, chunks of prompts after them, and inputs of each row.

A pending token, a chain of drafts, a tree of drafts and a part of a prompt have the same representation. Inputs of a
row in addition to its tokens (positions shifted by images, the sequence length that selects RoPE frequencies, an
adapter) are declared here once, for every forward and layer.

A drafter may read hidden states of several depths. EAGLE-3 introduced the outputs of earlier layers as inputs of its
head, in addition to the last hidden state (Li et al. 2025, arXiv 2503.01840).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from redrafter import kernels
from redrafter.attention.prompt_attention import Piece
from redrafter.attention.tree_plan import ChunkEnds, PromptChunks
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import KVCache, LayerShape
from redrafter.cache.paged import PagedCache
from redrafter.cache.to_device import to_device
from redrafter.errors import MismatchError, UnsupportedError
from redrafter.features import Feature
from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class ForwardBatch:
    """The new nodes of B rows' trees, which one forward computes, and chunks of P other prompts after them.

    Attributes:
        tree: The trees, M new nodes each.
        length: Committed tokens of each row, `[B]` int64.
        cache: KV cache of the rows, which stores the new nodes; its pool stores the chunks.
        logits_index: Index of the one new node of each row at which to compute the head, `[B]` int64; None for all M.
        inputs: The number of each row that a feature reads, `[B]` int64, by feature; a feature that no row uses is left
            out. `IMAGES`: offset from the slots of the row's tokens to their positions, as an image has other numbers
            of positions than tokens. `ROPE_BY_LENGTH`: minimum sequence length that selects RoPE frequencies; without
            it, the length up to each token. `ADAPTERS`: slot of the row's adapter, 0 for none.
            `OWN_DRAFTS`: number of the texts that share recycled drafts, 0 for most.
        chunks: Chunks of prompts that are read in addition to the trees, on a paged cache; None for none.
        pieces: For chains that are parts of prompts, the tokens read of each row that continues; its recurrent states
            are then those after them. None for a tree, whose path is committed later.
        flat_outputs: Whether to return logits and hidden states of the T verified nodes alone if rows share nodes. By
            row, they also have entries for all nodes that are not verified.
    """

    tree: Tree
    length: Tensor
    cache: KVCache
    logits_index: Tensor | None = None
    inputs: Mapping[Feature, Tensor] = field(default_factory=dict)
    chunks: PromptChunks | None = None
    pieces: Sequence[Piece] | None = None
    flat_outputs: bool = False

    @property
    def places(self) -> Tensor:
        """The index of each new node in its row's sequence, `[B, M]` int64."""
        return self.length[:, None] + self.tree.depth[:, -self.tree.new :]

    def slots(self) -> Tensor:
        """Return the slots of new nodes in the pools of the cache, then of the token before each, `[2, B * M]` int64.

        The token before a node is its parent or the last committed one; of a sequence's first token, it is any.
        """
        tree, new = self.tree, self.tree.new
        if kernels.TRITON and isinstance(self.cache, PagedCache) and self.length.is_cuda:
            return kernels.token_order.new_slots(tree.parents, tree.depth, self.length, self.cache.table, new)
        parents, depth = (x[:, -new:] for x in (tree.parents, tree.depth))
        nodes = torch.arange(tree.tokens.shape[1], device=self.length.device)[-new:]
        # Padding nodes may be past the end of the row, and the first token has no token before it.
        placed = (self.length[:, None] + x for x in (nodes, parents.masked_fill(depth == 0, -1)))
        return torch.stack([self.cache.slots(x.clamp(0, self.cache.window - 1)) for x in placed])

    def flat(self, of_rows: Tensor, of_chunks: Tensor | None) -> Tensor:
        """Return a value for each of T tokens: first of new nodes, `[B, M]` or `[B, 1]`, then of chunks."""
        of_nodes = of_rows.expand(-1, self.tree.new).flatten()[self.tree.verified_nodes]
        return of_nodes if of_chunks is None else torch.cat([of_nodes, of_chunks])

    def token_inputs(self, feature: Feature) -> Tensor:
        """Return the number that a feature reads for each of T tokens, `[T]` int64; 0 for rows without one."""
        of_rows = self.inputs.get(feature)
        of_rows = torch.zeros_like(self.length) if of_rows is None else of_rows
        chunks = self.chunks
        return self.flat(of_rows[:, None], None if chunks is None else chunks.by_token(chunks.inputs[feature]))


@dataclass(frozen=True)
class ForwardOutput:
    """The outputs of a forward.

    Attributes:
        tree: The trees of the batch, without tokens that cannot be accepted because the model's rope switches there.
        logits: Logits of the new nodes, `[B, M, V]`; M is 1 with `logits_index`. Logits of the T verified nodes,
            `[1, T, V]`, with `flat_outputs`.
        hidden: Hidden states that a drafter reads, `[B, M, F]`, or `[1, T, F]` likewise.
        chunk_ends: Both of the last token of each chunk; None for no chunks.
    """

    tree: Tree
    logits: Tensor
    hidden: Tensor
    chunk_ends: ChunkEnds | None = None


class LogitsReader(Protocol):
    """Stores what later steps draft from: texts of prompts, and the logits of each step. Rows are the step's state."""

    def read_step(self, rows: Any, tree: Tree, logits: Tensor) -> None:
        """Read a step.

        Args:
            rows: The rows before the step.
            tree: The verified tree.
            logits: The target's logits at its nodes, `[B, N, V]`, or at the T verified ones of a ragged tree, `[1, T,
                V]`.
        """

    def read_prompts(self, rows: Any, width: int) -> None:
        """Read the texts of new rows, of at most `width` committed tokens each."""


@dataclass(frozen=True)
class Prompts:
    """Prompts, or parts of prompts, to be read into a cache, in one forward or several.

    Attributes:
        tokens: Each row's prompt, padded on the right with arbitrary ids, `[B, P]` int64.
        starts: Number of each row's tokens that the cache holds already.
        ends: Position to stop before in each row, after its start.
        cache: KV cache of the rows, which stores the tokens.
        inputs: As in `ForwardBatch`; `ROPE_BY_LENGTH` defaults to `ends`.
    """

    tokens: Tensor
    starts: Sequence[int]  # on the host, as are the ends: a forward is planned without waiting for the device
    ends: Sequence[int]
    cache: KVCache = field(repr=False)
    inputs: Mapping[Feature, Tensor] = field(default_factory=dict)

    @cached_property
    def upto(self) -> Tensor:
        """The ends on the tokens' device, `[B]` int64."""
        return to_device(self.ends, self.tokens.device, torch.long)


def decoder_layers(model: PreTrainedModel, count: int, layer_ids: Sequence[int]) -> list[nn.Module]:
    """Return the decoder layers with these numbers, from 0, of a causal LM with `count` layers.

    Raises:
        MismatchError: There is no such layer.
        UnsupportedError: The model does not hold its layers in a list.
    """
    for index in layer_ids:
        if not 0 <= index < count:
            raise MismatchError(
                f"the drafter reads layer {index}; {type(model).__name__} has {count} layers, from 0 to {count - 1}"
            )
    if not layer_ids:
        return []
    stack = decoder_stack(model, count)
    if stack is None:
        raise UnsupportedError(
            f"{type(model).__name__} does not hold its {count} layers in a list, so a drafter cannot read them; "
            "train one with --target-layers none"
        )
    return [stack[index] for index in layer_ids]


def decoder_stack(model: PreTrainedModel, count: int) -> nn.ModuleList | None:
    """Return the list of a model's `count` decoder layers, or None if it does not hold them in a list."""
    decoder: nn.Module = model.get_decoder()  # an encoder of images or sound may have as many layers
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), None)


def join_hidden(last: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Concatenate the last hidden state and the outputs of L earlier layers, `[..., D]` each, for a drafter.

    The result is `[..., F]` with F = (1 + L) * D, in the dtype and on the device of `last`.

    Raises:
        UnsupportedError: A layer's output has another rank or width than the last hidden state.
    """
    for output in outputs:
        if output.dim() != last.dim() or output.shape[-1] != last.shape[-1]:
            raise UnsupportedError(
                f"a layer's output has the shape {list(output.shape)} and the last hidden state {list(last.shape)}: a "
                "drafter cannot read them together; train one with --target-layers none"
            )
    return torch.cat([last, *(x.to(last) for x in outputs)], dim=-1) if outputs else last


@dataclass(frozen=True)
class DrafterLayer:
    """Keys and values that a drafter stores of every token that the target reads.

    They are one more layer after the target's own in each cache. So all operations of the cache apply to them too:
    blocks, reuse of prefixes, moves of rows, commits of paths.

    Attributes:
        owner: The drafter.
        shape: Shape of the keys and values that it stores for a token.
        remember: Computes keys and values `[T, H, d]` of tokens, from their ids `[T]`, their positions `[T]` and the
            hidden states that the drafter reads, `[T, F]`: their own, or, where the shape has a third vector
            (`extra_dim`), the vector of the token before each, `[T, X]`.
        carry: Computes the third vectors, `[T, X]`, from ids and hidden states; None to store the hidden states.
    """

    owner: object
    shape: LayerShape
    remember: Callable[..., tuple[Tensor, Tensor]]
    carry: Callable[[Tensor, Tensor], Tensor] | None = None

    def write(
        self, cache: KVCache, slots: Tensor, prior: Callable[[], Tensor], ids: Tensor, positions: Tensor, hidden: Tensor
    ) -> None:
        """Store the keys and values of tokens, whose hidden states are `[T, F]`, in slots `[T]` of a cache's pools.

        `prior` returns the slot of the token before each, `[T]` int64, and any slot for the first token of a sequence.
        """
        if not cache.has_drafter_layer:
            return  # the cache was made before the drafter was loaded
        # A NaN would stay in the cache, as no mask hides one from the drafter. Its drafts do not change the output.
        stores, hidden = cache.stores(-1), hidden.nan_to_num(0, 0, 0)
        state = hidden
        if self.shape.extra_dim:
            # The token before may be in this forward or an earlier one, or in a block that was reused from a prefix.
            carried = hidden if self.carry is None else self.carry(ids, hidden).nan_to_num(0, 0, 0)
            stores[2].index_copy_(0, slots, carried[:, None])
            state = stores[2].index_select(0, prior())[:, 0]
        for store, side in zip(stores[:2], self.remember(ids, positions, state), strict=True):
            store.index_copy_(0, slots, side.nan_to_num(0, 0, 0))

    def write_later(self, cache: DenseCache, slots: Tensor, prior: Callable[[], Tensor], *tokens: Tensor) -> None:
        """Do what `write` does, with its arguments, before the entries are read and for several forwards at once."""
        if cache.has_drafter_layer:
            cache.write_later(self._write_all, slots, prior() if self.shape.extra_dim else slots, *tokens)

    def _write_all(self, cache: KVCache, slots: Tensor, prior: Tensor, *tokens: Tensor) -> None:
        self.write(cache, slots, lambda: prior, *tokens)
