"""The proposer that drafts with an EAGLE-3 head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.decoder_parts import AttentionProducts, GatedMLP, RMSNorm, of_beams
from redrafter.drafting.drafter_config import EagleConfig
from redrafter.drafting.drafter_model import compile_once, drafter_layer, mark_dynamic, partial_linear
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.paged_entries import PagedEntries, reads_pages, with_themselves
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import GivenTexts, ReadAt, TrainableDrafter
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand, PartOfScores


class EagleEntries(NamedTuple):
    """Keys and values of entries, ready to attend to.

    Attributes:
        keys: Rotated keys, normalised if the head normalises them, `[..., S, H, d]`.
        values: `[..., S, H, d]`.
    """

    keys: Tensor
    values: Tensor


class PastEntries(NamedTuple):
    """Copies of the entries of the committed tokens of B rows, for a CPU, a dense cache and given texts.

    Attributes:
        entries: Keys and values of S entries, those past a row's end included, `[B, S, H, d]`.
        bias: Added to scores, float32: -inf past a row's end, else 0; `[B, 1, 1, S]`, or `[B, 1, w g, S]`
            where beams see different entries, g query heads of each.
        length: Committed tokens of each row, `[B]` int64.
    """

    entries: EagleEntries
    bias: Tensor
    length: Tensor

    @classmethod
    def from_entries(cls, entries: EagleEntries, length: Tensor) -> "PastEntries":
        """Return the past of rows with these entries of their tokens 1 to S, `[B, S, H, d]`."""
        position = torch.arange(entries.keys.shape[1], device=length.device)
        return cls(entries, _hide(position >= length[:, None] - 1)[:, None, None], length)

    def at(self, row: Tensor, length: Tensor) -> "PastEntries":
        """Return the past of rows `row` `[A]` int64 after `length` `[A]` int64 committed tokens each, as A rows."""
        return PastEntries.from_entries(EagleEntries(*(part[row] for part in self.entries)), length)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, path: EagleEntries | None
    ) -> tuple[Tensor, EagleEntries]:
        """Attend from beams to the committed entries of their row, and to those that were drafted on the beam.

        Args:
            query: `[B, w, h, d]`.
            key: Finished keys of the beams, `[B, w, H, d]`.
            value: Values of the beams, `[B, w, H, d]`.
            path: The entries that were drafted before on each beam, `[B, w, k, H, d]`; None for none.

        Returns:
            The attended values, `[B, w, h d]`, and the entries of each beam with the new one at the end.
        """
        new = EagleEntries(key[:, :, None], value[:, :, None])
        if path is not None:
            new = EagleEntries(*(torch.cat(pair, dim=2) for pair in zip(path, new, strict=True)))
        return _attend(query, new, self), new


class PagedPast(NamedTuple):
    """The entries of the committed tokens of B rows, in the blocks of their cache.

    Attributes:
        entries: The entries, with those of the drafts that the search has made so far.
        length: Committed tokens of each row, `[B]` int64.
    """

    entries: PagedEntries
    length: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, path: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend as `PastEntries.attend` does. A path marks the drafts that a beam descends from, `[B, w, n]` bool."""
        seen = with_themselves(path, query.shape[0], query.shape[1], query.device)
        return self.entries.attend(query, key, value, self.entries.rows(seen)).flatten(2), seen


class _Layer(nn.Module):
    """The weights of the decoder layer, which `EagleDrafter` computes."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        width, eps = config.width, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        # Queries, keys and values read joined inputs `[e; h]`.
        self.self_attn, self.mlp = AttentionProducts(2 * width, config, config.qk_norm), GatedMLP(config)


@register_drafter()
class EagleDrafter(TrainableDrafter):
    """An EAGLE-3 head; the target's embedding table is shared, unless the head has a table."""

    splits_head = True
    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig):
        """Make a head with random weights; see `DrafterModel`."""
        super().__init__(config)
        joined, eps = config.num_target_layers * config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(joined, eps) if config.norm_before_fc else None
        norms = (RMSNorm(config.hidden_size, eps) for _ in range(config.num_target_layers))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(joined, config.width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.width, eps)
        self.lm_head = nn.Linear(config.width, config.num_draft_ids, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if config.own_embedding else None
        self.post_init()

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the head stores: every token's entry, and its term of the entry of the next one."""
        self.midlayer.self_attn.find_frequencies(target.device)
        functions: tuple[Callable[..., Any], ...] = _finish, _carry
        finish, carry = (compile_once(f, combo_kernels=True) if compiled else f for f in functions)
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        remember, carry = partial(finish, self, target.embedding), partial(carry, self)
        terms = 2 * heads * width  # of a key and of a value
        return drafter_layer(self, target, heads, width, remember, carry, extra_dim=terms, compiled=compiled)

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft reads parts of the head: the fusion of the target's layers once."""
        return {**super().part_reads(depth), "fc.": 1}

    def embed(self, tokens: Tensor, table: nn.Module) -> Tensor:
        """Return the embeddings of ids `[...]`, `[..., D]`: from the target's `table`, or from the head's own.

        They are normalised first, so a scale that the target applies to its own has no effect.
        """
        embedded: Tensor = (table if self.embed_tokens is None else self.embed_tokens)(tokens)
        return embedded

    def fuse_hidden(self, hidden: Tensor) -> Tensor:
        """Fuse the outputs of the target's layers into the hidden state that the first draft reads.

        Args:
            hidden: The target's last hidden state, which is ignored, followed by the outputs of the layers, `[..., F]`.

        Returns:
            `[..., D]`.
        """
        outputs = hidden[..., self.config.hidden_size :]
        if self.input_norm is not None:
            outputs = self.input_norm(outputs)
        if self.fc_norm is not None:
            parts = torch.unflatten(outputs, -1, (len(self.fc_norm), -1)).unbind(-2)
            outputs = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(outputs)
        return fused

    def carry(self, hidden: Tensor) -> Tensor:
        """Compute what tokens add to the key and the value of the entry of the next one, `[..., 2 H d]`.

        A product of joined inputs is the sum of a product of each. So an entry, which reads the hidden state of the
        token before, is finished when its own token is computed, though that state may be of an earlier forward.

        Args:
            hidden: Hidden states of the tokens as `fuse_hidden` returns them, `[..., D]`.
        """
        normed = self.midlayer.hidden_norm(hidden)
        return self.midlayer.self_attn.keys_and_values(normed, slice(self.config.width, None), with_bias=True)

    def finish(self, embedding: Tensor, carried: Tensor, position: Tensor) -> EagleEntries:
        """Compute the entries of tokens, `[..., H, d]`.

        Args:
            embedding: The embeddings of the tokens, `[..., D]`.
            carried: What the token before each adds, as `carry` returns it, `[..., 2 H d]`.
            position: Positions of the tokens before, which broadcast to `[...]`, int64.
        """
        attention, normed = self.midlayer.self_attn, self.midlayer.input_layernorm(embedding)
        terms = carried + attention.keys_and_values(normed, slice(self.config.width), with_bias=False)
        key, value = attention.by_head(terms).chunk(2, dim=-2)
        return EagleEntries(attention.finish_key(key, position), value)

    def read_past(self, embedding: Tensor, hidden: Tensor, length: Tensor) -> PastEntries:
        """Return the entries of whole texts.

        Args:
            embedding: The embeddings of their tokens, `[B, T, D]`.
            hidden: Their hidden states as `fuse_hidden` returns them, `[B, T, D]`.
            length: Committed tokens of each, `[B]` int64.
        """
        position = torch.arange(embedding.shape[1] - 1, device=embedding.device)
        return PastEntries.from_entries(self.finish(embedding[:, 1:], self.carry(hidden)[:, :-1], position), length)

    def step(
        self, embedding: Tensor, hidden: Tensor, position: Tensor, path: Any, past: PastEntries | PagedPast
    ) -> tuple[Tensor, Tensor, Any]:
        """Compute one entry of each of w beams, and the logits of the token after it.

        Args:
            embedding: The embedding of each beam's last token, `[B, w, D]`.
            hidden: The hidden state of the token before it, fused from the target's or drafted, `[B, w, D]`.
            position: Position of that token, `[B, w]` int64, or `[B, 1]` where it is the same for all beams.
            path: Entries of earlier drafts of each beam, as `past.attend` returned it; None for nothing.
            past: The entries of the committed tokens.

        Returns:
            Logits `[B, w, V']` over the head's vocabulary, the drafted hidden states `[B, w, D]`, and the path of each
            beam with the new entry.
        """
        x, hidden, path = self.advance(embedding, hidden, position, path, past)
        return self.score(x), hidden, path

    forward = step

    def advance(
        self, embedding: Tensor, hidden: Tensor, position: Tensor, path: Any, past: PastEntries | PagedPast
    ) -> tuple[Tensor, Tensor, Any]:
        """Make one step without its last product, for the same arguments as `step`.

        Returns:
            The input of `lm_head` and the drafted hidden states, `[B, w, D]` each, and the path of each beam.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        e, h = layer.input_layernorm(embedding), layer.hidden_norm(hidden)
        joined = torch.cat([e, h], dim=-1)
        query, key, value = attention.heads_of(joined, position)
        read, path = past.attend(query, key, value, path)
        residual = h if self.config.norm_before_residual else hidden
        x = residual + partial_linear(attention.o_proj, read, slice(None), with_bias=True)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x, path

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Draft over given texts, as EAGLE-3's training-time test does; see `TrainableDrafter.unroll`.

        All positions of a row draft at once, as the beams of one search. From the second step on, each reads the hidden
        state that it drafted itself; it attends to the committed entries before it and to the entries of its own steps.
        """
        tokens, embedding, segment = texts.tokens, texts.embedding, texts.segment
        rows, length = tokens.shape
        fused, index = self.fuse_hidden(texts.features), torch.arange(length, device=tokens.device)
        if self.embed_tokens is not None:
            embedding = self.embed_tokens(tokens)
        seen = (index[:-1] < index[:, None]).expand(rows, -1, -1)  # [B, T, S]
        if segment is not None:
            seen = seen & (segment[:, :, None] == segment[:, None, :-1])
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        past = self.read_past(embedding, fused, torch.full_like(tokens[:, 0], length))
        past = past._replace(bias=_hide(~seen).repeat_interleave(groups, dim=1)[:, None])
        hidden, path, head_inputs = fused, None, []
        for k in range(texts.position.shape[1]):
            # steps past the end have a weight of 0 in the loss
            ahead = embedding[:, (index + 1 + k).clamp(max=length - 1)]
            arguments = ahead, hidden, (index + k)[None], path, past
            if tokens.is_cuda:  # the scores of all positions would take most of the memory, so they are recomputed
                x, hidden, path = checkpoint(self.advance, *arguments, use_reentrant=False)
            else:
                x, hidden, path = self.advance(*arguments)
            head_inputs.append(x.flatten(0, 1).index_select(0, texts.anchors))
        return torch.stack(head_inputs, dim=1)

    def unroll_bytes(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return about how many bytes `unroll` keeps on a GPU; see `TrainableDrafter.unroll_bytes`."""
        config = self.config
        entries = 4 * steps * (6 * config.width + 2 * (1 + steps) * config.num_key_value_heads * config.head_dim)
        layer = 4 * (8 * config.width + 4 * config.intermediate_size)  # of one step: the others are computed again
        scores = 14 * config.num_attention_heads * length  # of one step: three copies and a mask
        positions = rows * length
        return {"the drafter's states": positions * (entries + layer), "its attention to the texts": positions * scores}

    def read_texts(self, tokens: Tensor, hidden: Tensor, embedding: Tensor) -> ReadAt:
        """Return a function of the entries before positions of texts; see `TrainableDrafter.read_texts`."""
        if self.embed_tokens is not None:
            embedding = self.embed_tokens(tokens)
        return self.read_past(embedding, self.fuse_hidden(hidden), torch.full_like(tokens[:, 0], tokens.shape[1])).at

    def context_bytes(self, length: int, beams: int) -> int:
        """Return the bytes of a text's entries, which are copied, and of scores."""
        config = self.config
        stored = 4 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        return length * (stored + 12 * beams * config.num_attention_heads)


def _hide(missing: Tensor) -> Tensor:
    """Return the mask to add to scores, float32: -inf where entries are missing, else 0."""
    return torch.zeros_like(missing, dtype=torch.float32).masked_fill(missing, -torch.inf)


def _attend(query: Tensor, path: EagleEntries, past: PastEntries) -> Tensor:
    """Attend from beams to the committed entries of their row, and to those that were drafted on the beam.

    Args:
        query: `[B, w, h, d]`.
        path: Entries of each beam, `[B, w, k, H, d]`.
        past: Entries of each row, `[B, S, H, d]`.

    Returns:
        The attended values, `[B, w, h d]`.
    """
    beams, steps = path.keys.shape[1:3]
    query = query.unflatten(2, (past.entries.keys.shape[2], -1)) * query.shape[-1] ** -0.5
    by_row = query.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, H, w g, d]
    far = by_row @ past.entries.keys.permute(0, 2, 3, 1)  # [B, H, w g, S]
    near = query @ path.keys.permute(0, 1, 3, 4, 2)  # [B, w, H, g, k]
    near_by_row = near.transpose(1, 2).flatten(2, 3)  # [B, H, w g, k]
    # One softmax over both parts: the text's and the beam's entries share their sum of weights.
    weights = torch.cat([far.float() + past.bias, near_by_row.float()], dim=-1).softmax(dim=-1).to(query.dtype)
    far, near = weights[..., :-steps], weights[..., -steps:].unflatten(2, (beams, -1))  # near [B, H, w, g, k]
    read = (far @ past.entries.values.transpose(1, 2)).unflatten(2, (beams, -1)).transpose(1, 2)  # [B, w, H, g, d]
    read = read + near.transpose(1, 2) @ path.values.transpose(2, 3)
    return read.flatten(2)


@dataclass(frozen=True)
class EagleProposer(SearchProposer):
    """Drafts with an EAGLE-3 head; has the attributes of `SearchProposer`.

    Entries of committed tokens are stored in the target's cache and not recomputed.
    """

    drafter: EagleDrafter
    stores_drafts = True

    def read_context(self, state: State, cache: KVCache) -> PastEntries | PagedPast:
        """Return the entries of the rows' committed tokens."""
        if reads_pages(cache):
            return PagedPast(PagedEntries.from_cache(cache, state.length), state.length)
        # The first token, which has none before it, has no entry.
        position = torch.arange(1, cache.window, device=state.length.device).expand(len(state.length), -1)
        return PastEntries.from_entries(EagleEntries(*cache.read_drafter_layer(position)), state.length)

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: PastEntries | PagedPast) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        head, table = self.drafter, self.target.embedding
        head.midlayer.self_attn.find_frequencies(state.hidden.device)
        functions: tuple[Callable[..., Any], ...] = EagleDrafter.fuse_hidden, _advance
        compiled = False
        if self.compiled and isinstance(context, PagedPast):
            compiled, functions = True, tuple(compile_once(f, combo_kernels=True) for f in functions)
            mark_dynamic((state.hidden, context.length, context.entries.length, context.entries.table), 0)
        fuse, advance = functions
        carried = fuse(head, state.hidden)[:, None]  # [B, w, D], the hidden state that each beam reads
        path: Any = None  # the drafts of each beam
        position = context.length - 1 + torch.arange(self.depth, device=context.length.device)[:, None]  # [K, B]

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor | PartOfScores:
            nonlocal carried, path
            before = position[k, :, None]
            if compiled:
                mark_dynamic((tokens, sources, carried), 0, 1)
                mark_dynamic((before,), 0)
                mark_dynamic((path,), 0, 1, 2)
            logits, carried, path = advance(head, table, tokens, sources, carried, before, path, context)
            return head.draft_scores(logits, sampler, noise, k)

        return expand


EagleDrafter.proposer_class = EagleProposer


def _advance(
    head: EagleDrafter,
    table: nn.Module,
    tokens: Tensor,
    sources: Tensor,
    carried: Tensor,
    position: Tensor,
    path: Any,
    past: PastEntries | PagedPast,
) -> tuple[Tensor, Tensor, Any]:
    """Make one step of the head for every beam, from the hidden state and the path of the beam that it continues.

    Args:
        head: The head.
        table: The target's embedding table.
        tokens: Last token of each beam, `[B, w]` int64.
        sources: Beam of the previous step that each beam continues, `[B, w]` int64.
        carried: Hidden states that the previous step drafted, `[B, w', D]`, or at the first step the target's.
        position: Position of the token before the last one, `[B, 1]` int64.
        path: What the previous step returned; None at the first step.
        past: The entries of the committed tokens.

    Returns:
        As `EagleDrafter.step`.
    """
    if path is not None:
        carried = of_beams(carried, sources)
        path = (
            of_beams(path, sources) if isinstance(path, Tensor) else EagleEntries(*(of_beams(x, sources) for x in path))
        )
    return head.step(head.embed(tokens, table), carried, position, path, past)


def _carry(head: EagleDrafter, _: Tensor, hidden: Tensor) -> Tensor:
    return head.carry(head.fuse_hidden(hidden))


def _finish(
    head: EagleDrafter, embedding: nn.Module, ids: Tensor, positions: Tensor, carried: Tensor
) -> tuple[Tensor, Tensor]:
    return head.finish(head.embed(ids, embedding), carried, (positions - 1).clamp(min=0))
