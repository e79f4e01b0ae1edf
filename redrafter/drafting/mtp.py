"""The proposer that drafts with a layer for multi-token prediction (MTP), which the target's own checkpoint holds.

The layer is a decoder layer of the target's class. Its entry of position p reads the target's hidden state there and
the token after it, and predicts the token after that one (Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437). Applied again to its own output and the token that it drafted, it drafts further ones.
"""

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from redrafter.attention.mask import additive_mask
from redrafter.attention.tree_attention import explicit_attention, register_attention
from redrafter.cache.dense import CACHE_NAME, cache_argument
from redrafter.cache.kv_cache import KVCache, LayerShape
from redrafter.drafting.decoder_parts import of_beams
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel, layer_bytes
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.errors import UnsupportedError
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree

PAST = 1024  # nearest entries that a draft attends to; bounds what a step copies from the cache


class _Made(Exception):
    """Not an error: ends a layer's forward and carries the keys and values that it would attend to."""


@dataclass(frozen=True)
class Past:
    """Keys and values of the text that the drafts of B rows attend to, with room for those of the drafts after them.

    Attributes:
        keys: S entries of each row and then room, `[B, H, S + n, d]`.
        values: Likewise.
        seen: Which of the S entries a row has, `[B, S]` bool.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


# Entries that a running layer attends to in addition to its own input; None for a layer whose keys are wanted.
RUNNING_PAST: ContextVar[Past | None] = ContextVar("mtp_past", default=None)


class DraftedEntries:
    """Keeps what a decoder layer stores of drafts, in place of the cache that transformers gives it."""

    def __init__(self) -> None:
        self._stored: tuple[Tensor, ...] = ()

    def update(self, *states: Any, **_: Any) -> tuple[Tensor, ...]:
        """Append two tensors `[B, H, w, d]`, and return all; later entries of the call are not needed."""
        new: tuple[Tensor, ...] = states[:2]
        if self._stored:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self._stored, new, strict=True))
        self._stored = new
        return new

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of entries."""
        return self._stored[0].shape[2] if self._stored else 0


def attend_to_past(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to `RUNNING_PAST` and to entries of drafts, `[B, H, n, d]`, as an attention function of transformers."""
    past = RUNNING_PAST.get()
    if past is None:
        # Only keys and values are needed; an exception skips the attention and MLP of the layer.
        raise _Made(key, value)
    size, count = past.seen.shape[1], key.shape[2]
    # In place, as the buffers have room for drafts: copying the text's entries at each step would be costly.
    past.keys[:, :, size : size + count], past.values[:, :, size : size + count] = key, value
    out = explicit_attention(
        query,
        past.keys[:, :, : size + count],
        past.values[:, :, : size + count],
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap or 0.0,
        s_aux,
    )
    return out.transpose(1, 2), None


ATTENTION_NAME = "redrafter_mtp"
register_attention(ATTENTION_NAME, attend_to_past)


class MTPConfig(AnyDrafterConfig):
    """Facts about an MTP layer, which is in the checkpoint of its base, and `AnyDrafterConfig`'s fields.

    Attributes:
        family: The names that its tensors have, one of those in `redrafter.checkpoints.mtp`.
        hidden_first: Whether the layer's product reads `[hidden; embedding]`, in place of `[embedding; hidden]`.
        first_embedding_is_zero: Whether the entry at position 0 reads zeros in place of an embedding.
        layers: MTP layers in the checkpoint of the base, of which the first one drafts.
    """

    model_type = "redrafter_mtp"

    family: str = ""
    hidden_first: bool = False
    first_embedding_is_zero: bool = False
    layers: int = 1
    draft_beams: int = 3
    draft_len_per_beam: int = 4


@register_drafter("MTP layer", "redrafter_mtp")
class MTPDrafter(DrafterModel):
    """An MTP layer; the target's embedding table and head are shared."""

    config_class = MTPConfig
    config: MTPConfig
    made_from_config = False
    identity_fields = ("model_type", "hidden_size", "vocab_size", "family")

    def __init__(self, config: MTPConfig, blocks: Sequence[nn.Module], norm: nn.Module, rotary: nn.Module | None):
        """Make a layer whose weights are loaded later.

        Args:
            config: The architecture.
            blocks: The decoder layers, exactly one of which attends: one layer, unless attention and MLP are separate.
            norm: A norm of the target's layers, which is copied.
            rotary: Module of rotary positions of the target's decoder; None for a target without one.
        """
        super().__init__(config)
        self.blocks = nn.ModuleList(blocks)
        self._cache_names = [cache_argument(block.forward) or CACHE_NAME for block in blocks]
        self.rotary = copy.deepcopy(rotary)  # some ropes change their frequencies in place
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the entries stored for every token: the layer's keys and values of the entry that reads it.

        That entry is of the position before, so it also reads the hidden state there.
        """
        one = torch.zeros(1, dtype=torch.long, device=target.device)
        remember = partial(self._remember, target.embedding)
        hidden = torch.zeros(1, self.config.hidden_size, dtype=target.dtype, device=target.device)
        with torch.no_grad():
            keys, values = remember(one, one, hidden)
        widths = keys.shape[2], values.shape[2], target.dtype, target.device
        shape = LayerShape(keys.shape[1], *widths, of_drafter=True, extra_dim=self.config.hidden_size)
        return DrafterLayer(self, shape, remember)

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `UnsupportedError` for a target whose head the layer cannot share."""
        if not isinstance(target.head, nn.Linear):
            raise UnsupportedError(
                f"{target.name} has a head of the type {type(target.head).__name__}, which its MTP layer cannot share "
                "yet: decode without drafts (--no-speculate), or give a drafter"
            )

    def placed(self, target: Target) -> DrafterModel:
        """Return the layer on a target's device, in the dtypes that it was loaded in."""
        module: Any = self
        return module.to(target.device).eval()

    @property
    def fingerprint_layer(self) -> nn.Module:
        """The layer whose norms distinguish it from one that was trained again: the head is the target's."""
        return self.projection

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the weights that a draft of `depth` search steps reads, without the target's head.

        All experts are counted, as a large tree reads them all.
        """
        own = sum(weight.nbytes for weight in self.parameters())
        return depth * own + layer_bytes(self.projection)

    def target_head_reads(self, depth: int) -> int:
        """Return how often a draft reads the target's head: at each step."""
        return depth

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Return inputs of the decoder layer, `[..., D]`, from embeddings and hidden states `[..., D]`."""
        parts = self.embedding_norm(embedding), self.hidden_norm(hidden)
        joined: Tensor = self.projection(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        return joined

    def embed(self, tokens: Tensor, position: Tensor, table: nn.Module) -> Tensor:
        """Return the embeddings of tokens `[...]`, `[..., D]`, for entries at positions that broadcast to `[...]`."""
        embedded: Tensor = table(tokens)
        if self.config.first_embedding_is_zero:
            embedded = embedded.masked_fill((position == 0).expand(tokens.shape)[..., None], 0)
        return embedded

    def _remember(self, table: nn.Module, ids: Tensor, positions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        position = (positions - 1).clamp(min=0)  # a sequence's first token has no entry to read
        try:
            self._run(self.join(self.embed(ids, position, table), before)[None], position[None], None)
        except _Made as made:
            keys, values = (x[0].transpose(0, 1).to(before.dtype) for x in made.args)  # [T, H, d]
            return keys, values
        raise UnsupportedError(
            f"{type(self.blocks[0]).__name__} does not attend through transformers' attention interface, so it cannot "
            "be an MTP layer here"
        )

    def step(self, inputs: Tensor, position: Tensor, seen: Tensor, past: Past, drafted: DraftedEntries) -> Tensor:
        """Compute entries of w beams, after n entries of drafts, and store them.

        Args:
            inputs: Inputs of the decoder layer, `[B, w, D]`.
            position: Their positions, `[B, w]` int64.
            seen: Which entries of drafts each attends to, its own included, `[B, w, n + w]` bool.
            past: Entries of the text to attend to, with room for all entries of drafts.
            drafted: The entries of drafts, to which w are added.

        Returns:
            The normed output, `[B, w, D]`: what the head reads, and in place of the target's hidden state the next
            entry.
        """
        seen = torch.cat([past.seen[:, None].expand(-1, inputs.shape[1], -1), seen], dim=-1)
        mask = additive_mask(seen, inputs.dtype)
        token = RUNNING_PAST.set(past)
        try:
            normed: Tensor = self.norm(self._run(inputs, position, mask, drafted))
        finally:
            RUNNING_PAST.reset(token)
        return normed

    forward = step

    def _run(self, x: Tensor, position: Tensor, mask: Tensor | None, entries: DraftedEntries | None = None) -> Tensor:
        # Some ropes have sections for images, which are equal for text; older versions of transformers need all three.
        positions = position.expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else position
        rope = {} if self.rotary is None else {"position_embeddings": self.rotary(x, positions)}
        for block, cache_name in zip(self.blocks, self._cache_names, strict=True):
            output = block(x, attention_mask=mask, position_ids=position, **{cache_name: entries}, **rope)
            x = output[0] if isinstance(output, tuple) else output
        return x


@dataclass(frozen=True)
class MTPProposer(SearchProposer):
    """Drafts with an MTP layer; the attributes are those of `SearchProposer`.

    Keys and values of committed tokens are read from the target's cache; those of drafts live as long as the search.
    """

    drafter: MTPDrafter

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        layer, head, rows = self.drafter, self.target.head, len(state.length)
        past, entries = self.read_past(cache, state.length), DraftedEntries()
        carried = state.hidden[:, None]  # [B, w, D], the hidden state that each beam reads
        seen = torch.zeros(rows, 1, 0, dtype=torch.bool, device=past.seen.device)  # [B, w, n], entries of each beam

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried, seen
            width = tokens.shape[1]
            if k:
                carried, seen = of_beams(carried, sources), of_beams(seen, sources)
            own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(rows, -1, -1)
            seen = torch.cat([seen, own], dim=-1)
            position = (state.length - 1 + k)[:, None].expand(-1, width)  # that of the hidden state
            inputs = layer.join(layer.embed(tokens, position, self.target.embedding), carried)
            carried = layer.step(inputs, position.clamp(min=0), seen, past, entries)
            # Not through the head's own forward, which may have hooks while another thread uses the target.
            logits = linear(carried, head.weight, head.bias)
            return sampler.draft_scores(logits, noise, k, None)

        return self.grow(state, sampler, expand)

    def read_past(self, cache: KVCache, length: Tensor) -> Past:
        """Return the nearest entries of the committed tokens of rows with `length` `[B]` int64 of them."""
        # Entries are made for the pending token and for each level but the last, from which nothing is drafted.
        count, room = min(cache.window - 1, PAST), 1 + (self.depth - 1) * self.beams
        # The entry of a position is stored with the next token, which it also reads.
        position = (length - count).clamp(min=1)[:, None] + torch.arange(count, device=length.device)  # [B, S]
        keys, values = (pad(x.transpose(1, 2), (0, 0, 0, room)) for x in cache.read_drafter_layer(position))
        return Past(keys, values, position < length[:, None])


MTPDrafter.proposer_class = MTPProposer
