"""The proposer that drafts with a layer for multi-token prediction (MTP), which the target's own checkpoint holds.

The layer is a decoder layer of the target's class. Its entry of position p reads the target's hidden state there and
the token after it, and predicts the token after that one (Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437). Applied again to its own output and the token that it drafted, it drafts further ones.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.drafter_config import MTPConfig
from redrafter.drafting.drafter_model import DrafterModel, drafter_layer, layer_bytes, partial_linear
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.errors import UnsupportedError
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree

PAST = 1024  # entries of the text that a draft attends to, the nearest ones: their keys are computed at each step
ENTRIES_AT_ONCE = 512  # of a row; bounds what computing them takes beside the result


class _Stored(Exception):
    """No error: ends the forward of a layer once its keys are known."""


class Entries:
    """Keys and values of one layer, in place of the cache that a decoder layer of transformers is given.

    What the layer stores is appended; the sequence is the third dimension of both, as in transformers' own caches.
    """

    def __init__(self) -> None:
        self.stored: tuple[Tensor, Tensor] | None = None
        self.stores_only = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all; or end the layer's forward where only these are wanted."""
        new = keys, values
        if self.stored is not None:
            new = torch.cat([self.stored[0], keys], dim=2), torch.cat([self.stored[1], values], dim=2)
        self.stored = new
        if self.stores_only:
            raise _Stored
        return new

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of entries."""
        return 0 if self.stored is None else self.stored[0].shape[2]


class MTPDrafter(DrafterModel):
    """An MTP layer; the target's embedding table and head are shared."""

    config_class = MTPConfig
    config: MTPConfig
    identity_fields = ("model_type", "hidden_size", "vocab_size", "family")
    # Keys and values of the past are made anew in each step. On an H100, steps of a bf16 base of 24 layers of width
    # 2048 after 1,000 tokens, with a chain of 3, took 1.8 steps without drafts at 1 row, 2.6 at 8 and 3.6 at 32.
    cost_per_row = 0.1

    def __init__(self, config: MTPConfig, blocks: Sequence[nn.Module], norm: nn.Module, rotary: nn.Module | None):
        """Make a layer whose weights are loaded later.

        Args:
            config: The architecture.
            blocks: The decoder layers, of which one attends: one alone, unless attention and MLP are layers apart.
            norm: A norm as the target's layers have it, which is copied.
            rotary: What computes rotary positions, as the target's decoder has it; None for a target without.
        """
        super().__init__(config)
        self.blocks = nn.ModuleList(blocks)
        self.rotary = copy.deepcopy(rotary)  # of some ropes the frequencies are changed in place
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return what is stored of every token: what its hidden state and its embedding add to inputs of the layer."""
        return drafter_layer(self, target, 1, self.config.hidden_size, partial(self._remember, target.embedding))

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `UnsupportedError` for a target whose head the layer cannot share."""
        if not isinstance(target.head, nn.Linear):
            raise UnsupportedError(
                f"{target.name} has a head of the type {type(target.head).__name__}, which its MTP layer cannot share "
                "yet: write without drafts (--no-speculate), or give a drafter"
            )

    def placed(self, target: Target) -> Any:
        """Return the layer on a target's device, in the dtypes that it was loaded in."""
        module: Any = self
        return module.to(target.device).eval()

    @property
    def told_by(self) -> nn.Module:
        """The product whose norms tell the layer from one that was trained anew: the head is the target's."""
        return self.projection

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the weights that a draft of `depth` search steps reads, the target's head apart.

        All experts are counted, which a large tree reads.
        """
        own = sum(weight.nbytes for weight in self.parameters())
        return depth * own + layer_bytes(self.projection)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return inputs of the decoder layer, `[..., D]`, from embeddings and hidden states `[..., D]`."""
        of_hidden, of_embedding = self._parts(embedding, hidden)
        return of_hidden + of_embedding

    def _parts(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what hidden states, and what embeddings, add to inputs of the decoder layer, `[..., D]` each."""
        halves = slice(self.config.hidden_size), slice(self.config.hidden_size, None)
        hidden_columns, embedding_columns = halves if self.config.hidden_first else halves[::-1]
        return (
            partial_linear(self.projection, self.hidden_norm(hidden), hidden_columns, with_bias=False),
            partial_linear(self.projection, self.embedding_norm(embedding), embedding_columns, with_bias=False),
        )

    def embed(self, tokens: Tensor, position: Tensor, table: nn.Module) -> Tensor:
        """Return the embeddings of tokens `[...]`, `[..., D]`, for entries at positions that broadcast to `[...]`."""
        embedded: Tensor = table(tokens)
        if self.config.first_embedding_is_zero:
            embedded = embedded.masked_fill((position == 0).expand(tokens.shape)[..., None], 0)
        return embedded

    def _remember(self, table: nn.Module, ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # A token's embedding is read by the entry before its own.
        parts = self._parts(self.embed(ids, positions - 1, table), hidden)
        return parts[0][:, None], parts[1][:, None]

    def store(self, inputs: Tensor, position: Tensor, entries: Entries) -> None:
        """Compute the keys and values of inputs `[B, S, D]` alone, at positions `[B, S]`."""
        entries.stores_only = True
        try:
            self._run(inputs, position, None, entries)
        except _Stored:
            entries.stores_only = False
            return
        raise UnsupportedError(f"{type(self.blocks[0]).__name__} stores no keys, so it cannot be an MTP layer here")

    def step(self, inputs: Tensor, position: Tensor, seen: Tensor, entries: Entries) -> Tensor:
        """Compute entries of w beams after those that are stored, and store them.

        Args:
            inputs: Inputs of the decoder layer, `[B, w, D]`.
            position: Their positions, `[B, w]` int64.
            seen: Which entries each attends to, its own included, `[B, w, S + w]` bool.
            entries: S entries, to which w are added.

        Returns:
            The normed output, `[B, w, D]`: what the head reads, and in place of the target's hidden state the next
            entry.
        """
        mask = torch.zeros(seen.shape, dtype=inputs.dtype, device=inputs.device)
        mask = mask.masked_fill(~seen, torch.finfo(inputs.dtype).min)[:, None]
        normed: Tensor = self.norm(self._run(inputs, position, mask, entries))
        return normed

    forward = step

    def _run(self, x: Tensor, position: Tensor, mask: Tensor | None, entries: Entries) -> Tensor:
        # Of ropes with sections for images, which text counts alike, older versions of transformers take all three.
        positions = position.expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else position
        rope = {} if self.rotary is None else {"position_embeddings": self.rotary(x, positions)}
        for block in self.blocks:
            output = block(
                x, attention_mask=mask, position_ids=position, past_key_values=entries, use_cache=True, **rope
            )
            x = output[0] if isinstance(output, tuple) else output
        return x


@dataclass(frozen=True)
class MTPProposer(SearchProposer):
    """Drafts with an MTP layer; the attributes are those of `SearchProposer`.

    What tokens add to inputs of the layer is read from the target's cache. Keys and values live as long as the search:
    the entry of a token needs the token after it, which no forward knows that stores the token's own.
    """

    drafter: MTPDrafter

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        layer, head, rows = self.drafter, self.target.head, len(state.length)
        entries, past = self.read_past(cache, state.length)
        carried = state.hidden[:, None]  # [B, w, D], the hidden state that each beam reads
        drafted = torch.zeros(rows, 1, 0, dtype=torch.bool, device=past.device)  # [B, w, n], entries of each beam

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried, drafted
            width = tokens.shape[1]
            if k:
                carried = carried.gather(1, sources[..., None].expand(-1, -1, carried.shape[-1]))
                drafted = drafted.gather(1, sources[..., None].expand(-1, -1, drafted.shape[-1]))
            own = torch.eye(width, dtype=torch.bool, device=past.device).expand(rows, -1, -1)
            drafted = torch.cat([drafted, own], dim=-1)
            position = (state.length - 1 + k)[:, None].expand(-1, width)  # that of the hidden state
            inputs = layer.join(layer.embed(tokens, position, self.target.embedding), carried)
            seen = torch.cat([past[:, None].expand(-1, width, -1), drafted], dim=-1)
            carried = layer.step(inputs, position.clamp(min=0), seen, entries)
            # Not through the head's own forward, which may have hooks while another thread uses the target.
            logits = linear(carried, head.weight, head.bias)
            return sampler.draft_scores(logits, noise, k, None)

        return self.grow(state, sampler, expand)

    def read_past(self, cache: KVCache, length: Tensor) -> tuple[Entries, Tensor]:
        """Return the nearest entries of the committed tokens of rows with `length` `[B]` int64 of them.

        Returns:
            S entries of each row, and which of them the row has, `[B, S]` bool.
        """
        count = min(cache.window - 1, PAST)
        first = (length - 1 - count).clamp(min=0)[:, None]  # [B, 1]
        entries = Entries()
        for begin in range(0, count, ENTRIES_AT_ONCE):
            position = first + torch.arange(begin, min(begin + ENTRIES_AT_ONCE, count) + 1, device=length.device)
            of_hidden, of_embedding = (x[:, :, 0] for x in cache.read_drafter_layer(position))  # [B, S + 1, D]
            self.drafter.store(of_hidden[:, :-1] + of_embedding[:, 1:], position[:, :-1], entries)
        position = first + torch.arange(count, device=length.device)
        return entries, position < length[:, None] - 1


MTPDrafter.proposer_class = MTPProposer
