"""The parallel drafter: layers that compute all drafts of a block in one pass, and a recurrent head over them.

Only the head is serial. At each level of a search it computes a gated cell and small products for every beam; the
layers, and the parts of the head that depend on a position alone, are computed once.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from redrafter.drafting.block_drafter import BlockContext, BlockDrafter, BlockProposer
from redrafter.drafting.decoder_parts import RMSNorm, Sines, fuse_outputs, gated_state, normalise, of_beams, rope_of
from redrafter.drafting.dflash_layers import BlockLayer
from redrafter.drafting.drafter_model import (
    compile_once,
    drafter_layer,
    for_any_tokens,
    layer_bytes,
    partial_linear,
)
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.parallel_config import ParallelConfig
from redrafter.drafting.proposer import State
from redrafter.drafting.shortlist import head_rows, likeliest_ids
from redrafter.drafting.text_drafters import GivenTexts
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Candidates, Expand


class HeadStart(NamedTuple):
    """The terms of a head's products that do not depend on drafts, computed once for K positions.

    Attributes:
        rough: `P p` of each position, `[..., K, R]`.
        inner: Term of the head's inner product, with its bias, `[..., K, D]`; None in a head without a state.
        gate: Term of the cell's product, with its bias, `[..., 1, 2D]`; None likewise.
    """

    rough: Tensor
    inner: Tensor | None
    gate: Tensor | None

    def at(self, k: int) -> "HeadStart":
        """Return the terms of the position of a number, from 0, for beams: `[..., 1, R]` and `[..., 1, D]`."""
        inner = None if self.inner is None else self.inner[..., k, None, :]
        return self._replace(rough=self.rough[..., k, None, :], inner=inner)


class RecurrentHead(nn.Module):
    """The serial part of the drafter; `ParallelConfig` states its equations."""

    def __init__(self, config: ParallelConfig):
        super().__init__()
        width, rank, self.kind = config.hidden_size, config.head_rank, config.head
        self.position_proj = nn.Linear(width, rank, bias=False)
        if self.kind != "none":
            self.gate = nn.Linear((3 if self.kind == "recurrent" else 2) * width, 2 * width)
            self.state_proj = nn.Linear(width, rank, bias=False)
            self.inner = nn.Linear(2 * width, width)
            self.inner_proj = nn.Linear(width, rank, bias=False)

    def begin(self, positions: Tensor, hidden: Tensor) -> HeadStart:
        """Compute what all beams share, of positions `[..., K, D]` and fused hidden states `[..., D]`."""
        rough = partial_linear(self.position_proj, positions, slice(None), with_bias=False)
        if self.kind == "none":
            return HeadStart(rough, None, None)
        width = hidden.shape[-1]
        inner = partial_linear(self.inner, positions, slice(width), with_bias=True)
        gate = partial_linear(self.gate, hidden, slice(-width, None), with_bias=True)
        return HeadStart(rough, inner, gate[..., None, :])

    def step(self, embedding: Tensor, state: Tensor | None, start: HeadStart) -> tuple[Tensor, Tensor | None]:
        """Compute the input of `lm_head` at a position of w beams.

        Args:
            embedding: The target's embedding of the token before the position, `[..., w, D]`.
            state: The recurrent state, `[..., w, D]`; None at the first position.
            start: The terms of the position, from `HeadStart.at`.

        Returns:
            The input, `[..., w, R]`, and the new state, `[..., w, D]`; None in a head without a state.
        """
        if start.inner is None or start.gate is None:
            return start.rough.expand(*embedding.shape[:-1], -1), None
        state = None if self.kind == "markov" else state
        inputs = embedding if state is None else torch.cat([embedding, state], dim=-1)
        product = partial_linear(self.gate, inputs, slice(inputs.shape[-1]), with_bias=False)
        state = gated_state(product + start.gate, state)
        return self._read(state, start, start.inner), state

    def unroll(self, embedding: Tensor, start: HeadStart) -> Tensor:
        """Compute what `step` does at all positions of one beam, of which only the recurrence is serial, `[..., K, R]`.

        Args:
            embedding: The target's embeddings of the tokens before the positions, `[..., K, D]`.
            start: What `begin` returned.
        """
        if start.inner is None or start.gate is None:
            return start.rough
        width = embedding.shape[-1]
        terms = partial_linear(self.gate, embedding, slice(width), with_bias=False) + start.gate  # [..., K, 2D]
        if self.kind == "markov":
            return self._read(gated_state(terms, None), start, start.inner)
        first, *others = terms.unbind(-2)
        states = [gated_state(first, None)]
        for term in others:
            product = partial_linear(self.gate, states[-1], slice(width, 2 * width), with_bias=False)
            states.append(gated_state(term + product, states[-1]))
        return self._read(torch.stack(states, dim=-2), start, start.inner)

    def _read(self, state: Tensor, start: HeadStart, inner: Tensor) -> Tensor:
        """Return the input of `lm_head` for new states `[..., w, D]`, `[..., w, R]`."""
        inner = partial_linear(self.inner, state, slice(state.shape[-1], None), with_bias=False) + inner
        direct = partial_linear(self.state_proj, state, slice(None), with_bias=False)
        return start.rough + direct + partial_linear(self.inner_proj, silu(inner), slice(None), with_bias=False)


@register_drafter("parallel drafter", "redrafter_parallel")
class ParallelDrafter(BlockDrafter):
    """A parallel backbone with a recurrent head; the target's embedding table is shared and not stored."""

    config_class = ParallelConfig
    config: ParallelConfig
    first_entry = 1
    identity_fields = (
        "model_type",
        "hidden_size",
        "vocab_size",
        "num_layers",
        "block_size",
        "head",
        "draft_vocab_size",
    )

    def __init__(self, config: ParallelConfig):
        """Make a drafter with random weights; see `DrafterModel`."""
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nn.Linear((1 + len(config.target_layers)) * width, width)
        self.entry_norm = RMSNorm(width, eps)
        self.entry_embedding = nn.Linear(width, width, bias=False)
        self.open = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(torch.zeros(config.block_size, width))
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(width, eps)
        self.head = RecurrentHead(config)
        self.lm_head: nn.Linear = nn.Linear(config.head_rank, config.num_draft_ids, bias=False)
        self.post_init()

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the weights that a draft of `depth` search steps reads."""
        head = self.head
        again = 0 if self.config.head_shortlist else (depth - 1) * layer_bytes(self.lm_head)
        if head.kind != "none":
            # The columns of the hidden state, those of the position, and biases are read once for all levels.
            of_hidden = self.config.hidden_size / head.gate.in_features
            serial = layer_bytes(head.gate, 1 - of_hidden, with_bias=False)
            serial += layer_bytes(head.inner, 1 / 2, with_bias=False)
            again += (depth - 1) * (serial + layer_bytes(head.state_proj) + layer_bytes(head.inner_proj))
        if head.kind == "recurrent":
            again -= layer_bytes(head.gate, 1 / 3, with_bias=False)  # the first level has no state
        # Entries are computed with the target's forward.
        return sum(weight.nbytes for weight in self.parameters()) - self.entry_embedding.weight.nbytes + again

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse the target's last hidden state with the outputs of `target_layers`, which are RMS-normalised first.

        Args:
            hidden: The last hidden state, after the final norm, and then the outputs of the layers, `[..., F]`.

        Returns:
            What positions and entries read, `[..., D]`, normalised.
        """
        config = self.config
        fused: Tensor = self.entry_norm(fuse_outputs(hidden, self.fuse, config.hidden_size, config.rms_norm_eps))
        return fused

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the drafter stores: every token's entry, and the key of the entry of the next one."""
        heads, width = self.config.num_layers * self.config.num_key_value_heads, self.config.head_dim
        rope = rope_of(self.config, target.device)  # of which a compiled function cannot copy anything to the device
        finish, carry = (_finish_compiled, _carry_compiled) if compiled else (_finish, _carry)
        remember, carry = partial(finish, self, rope), partial(carry, self, target.embedding)
        return drafter_layer(
            self, target, heads, width, remember, carry, extra_dim=heads * width, reads_own=True, compiled=compiled
        )

    def read_token(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the input of the entries that read tokens, `[..., D]`.

        Args:
            hidden: Hidden states of the tokens as `fuse_hidden` returns them, `[..., D]`.
            embedding: The target's embeddings of the tokens, `[..., D]`.
        """
        read: Tensor = hidden + self.entry_embedding(normalise(embedding.to(hidden.dtype), self.config.rms_norm_eps))
        return read

    def carry(self, token: Tensor) -> Tensor:
        """Compute the products of tokens in entries, `[..., 2 L H d]`.

        Those of keys come first, which the entry of the next token has; those of values are of a token's own entry.

        Args:
            token: What `read_token` returned for them, `[..., D]`.
        """
        attentions = [layer.self_attn for layer in self.stack]
        products = [each.k_proj for each in attentions] + [each.v_proj for each in attentions]
        return torch.cat([product(token) for product in products], dim=-1)

    def finish(self, before: Tensor, own: Tensor, position: Tensor | Sines) -> tuple[Tensor, Tensor]:
        """Compute the entries of tokens, `[..., L H, d]` each.

        A key is computed from the token before and a value from the token itself, as in `ContextAttention`: what
        resembles the first finds which token followed it there.

        Args:
            before: The keys of the token before each, from `carry`, `[..., L H d]`.
            own: What `carry` returned for the tokens, `[..., 2 L H d]`.
            position: Their positions, `[...]` int64, or the sines of these.
        """
        attentions = [layer.self_attn for layer in self.stack]
        parts = zip(attentions, before.chunk(len(attentions), dim=-1), strict=True)
        keys = torch.cat([each.finish_key(each.by_head(part), position) for each, part in parts], dim=-2)
        return keys, attentions[0].by_head(own[..., before.shape[-1] :])

    def remember_sequences(self, hidden: Tensor, embedding: Tensor, position: Tensor | Sines) -> tuple[Tensor, Tensor]:
        """Compute the entries of all tokens of sequences; see `BlockDrafter.remember_sequences`."""
        own = self.carry(self.read_token(hidden, embedding))
        keys, _ = own.chunk(2, dim=-1)
        return self.finish(pad(keys[:, :-1], (0, 0, 1, 0)), own, position)

    def open_block(self, pending: Tensor, hidden: Tensor, table: nn.Module) -> Tensor:
        """Return the slots, each with the pending token and the hidden state; see `BlockDrafter.open_block`."""
        # The target's table is frozen, and a training has float32 drafters for targets of any dtype.
        embedding = table(pending)[..., 0, :].detach().to(self.norm.weight.dtype)
        joined = torch.cat([hidden, normalise(embedding, self.config.rms_norm_eps)], dim=-1)
        opened: Tensor = self.open(joined)[..., None, :] + self.slots
        return opened

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Fill a block at each anchor, and unroll the head over the text; see `TrainableDrafter.unroll`."""
        steps, fused = texts.position.shape[1], self.fuse_hidden(texts.features)
        positions = self.fill_given(texts, fused)[:, :steps]  # [A, K, D]
        start = self.head.begin(positions, fused.flatten(0, 1).index_select(0, texts.anchors))
        made = self.head.unroll(texts.embedding.flatten(0, 1)[texts.position], start)
        if self.config.head_shortlist is None:
            return made
        return torch.cat([made, start.rough], dim=1)  # proposals are trained too: `trained_heads` separates them

    def trained_heads(self, x: Tensor) -> list[tuple[Tensor | None, ...]]:
        """Return the head, and with a shortlist its proposals, which share the weight."""
        parts = x.chunk(1 if self.config.head_shortlist is None else 2, dim=1)
        return [(part, self.lm_head.weight) for part in parts]


@dataclass(frozen=True)
class ParallelProposer(BlockProposer):
    """Drafts with a parallel drafter; has the attributes of `SearchProposer`."""

    drafter: ParallelDrafter

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: BlockContext) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        drafter, names = self.drafter, self.drafter.draft_ids
        fuse, begin, advance = _COMPILED if self.compiled else _UNCOMPILED
        fused = fuse(drafter, state.hidden)
        start = begin(drafter, self.fill(state, fused, context)[:, : self.depth], fused)
        proposed = None if drafter.config.head_shortlist is None else self._propose_ids(start.rough, sampler, noise)
        carried: Tensor | None = None  # [B, w, D], the recurrent state of each beam

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor | Candidates:
            nonlocal carried
            carried = None if carried is None else of_beams(carried, sources)
            x, carried = advance(drafter, self.target.embedding(tokens), carried, start.at(k))
            if proposed is None:
                return sampler.draft_scores(drafter.score(x), noise, k, names)
            ids = proposed[:, k, None]  # [B, 1, C]
            exact = x @ head_rows(drafter.lm_head, ids[:, 0], x.dtype).transpose(1, 2)  # [B, w, C]
            scores = sampler.draft_scores(exact, noise, k, ids if names is None else names[ids])
            return Candidates(scores, ids.expand_as(scores))

        return expand

    def _propose_ids(self, rough: Tensor, sampler: Sampler, noise: Tensor | None) -> Tensor:
        """Return the likeliest ids of each position by its own term of the head, `[B, K, C]`, for all beams alike."""
        drafter = self.drafter
        count, logits = max(drafter.config.head_shortlist or 0, self.beams), drafter.score(rough)  # [B, K, V']
        choose = partial(likeliest_ids, count=count, sampler=sampler, noise=noise, names=drafter.draft_ids)
        return torch.cat([choose(logits[:, k, None], step=k) for k in range(logits.shape[1])], dim=1)


ParallelDrafter.proposer_class = ParallelProposer


def _carry(drafter: ParallelDrafter, table: nn.Module, ids: Tensor, hidden: Tensor) -> Tensor:
    return drafter.carry(drafter.read_token(drafter.fuse_hidden(hidden), table(ids)))


def _finish(
    drafter: ParallelDrafter, rope: tuple[Tensor, float], _: Tensor, positions: Tensor, before: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    return drafter.finish(before, own, Sines.at(positions, *rope))


def _fuse(drafter: ParallelDrafter, hidden: Tensor) -> Tensor:
    return drafter.fuse_hidden(hidden)


def _begin(drafter: ParallelDrafter, positions: Tensor, fused: Tensor) -> HeadStart:
    return drafter.head.begin(positions, fused)


def _advance(
    drafter: ParallelDrafter, embedding: Tensor, carried: Tensor | None, start: HeadStart
) -> tuple[Tensor, Tensor | None]:
    return drafter.head.step(embedding, carried, start)


def _carry_compiled(drafter: ParallelDrafter, table: nn.Module, ids: Tensor, hidden: Tensor) -> Tensor:
    """Compute `_carry`, compiled for any number of tokens."""
    made: Tensor = compile_once(_carry)(drafter, table, *for_any_tokens(ids, hidden))
    return made


def _finish_compiled(drafter: ParallelDrafter, rope: tuple[Tensor, float], *by_token: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_finish`, compiled for any number of tokens."""
    made: tuple[Tensor, Tensor] = compile_once(_finish)(drafter, rope, *for_any_tokens(*by_token))
    return made


def _fuse_compiled(drafter: ParallelDrafter, hidden: Tensor) -> Tensor:
    """Compute `_fuse`, compiled for any number of rows."""
    made: Tensor = compile_once(_fuse)(drafter, *for_any_tokens(hidden))
    return made


def _begin_compiled(drafter: ParallelDrafter, positions: Tensor, fused: Tensor) -> HeadStart:
    """Compute `_begin`, compiled for any number of rows."""
    made: HeadStart = compile_once(_begin)(drafter, *for_any_tokens(positions, fused))
    return made


def _advance_compiled(
    drafter: ParallelDrafter, embedding: Tensor, carried: Tensor | None, start: HeadStart
) -> tuple[Tensor, Tensor | None]:
    """Compute `_advance`, compiled for any number of rows and beams."""
    for x, dim in (*((x, 0) for x in (embedding, carried, *start)), (embedding, 1), (carried, 1)):
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, dim)
    made: tuple[Tensor, Tensor | None] = compile_once(_advance)(drafter, embedding, carried, start)
    return made


_UNCOMPILED = _fuse, _begin, _advance
_COMPILED = _fuse_compiled, _begin_compiled, _advance_compiled
