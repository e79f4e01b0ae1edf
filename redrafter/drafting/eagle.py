"""The proposer that drafts with an EAGLE-3 head."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.decoder_parts import AttentionProducts, GatedMLP, of_beams
from redrafter.drafting.drafter_config import EagleConfig
from redrafter.drafting.drafter_model import drafter_layer, layer_bytes, partial_linear
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.drafting.text_drafters import GivenTexts, ReadAt, TrainableDrafter
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand


class EagleEntries(NamedTuple):
    """Keys and values of entries, ready to attend to.

    Attributes:
        keys: Normalised where the head does so, and rotated, `[..., S, H, d]`.
        values: `[..., S, H, d]`.
    """

    keys: Tensor
    values: Tensor


class PastEntries(NamedTuple):
    """The entries of the committed tokens of B rows, as attention reads them.

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
    def join(cls, parts: Sequence["PastEntries"]) -> "PastEntries":
        """Return parts that follow each other, as one."""
        keys, values = (torch.cat(sides, dim=1) for sides in zip(*(part.entries for part in parts), strict=True))
        return cls(EagleEntries(keys, values), torch.cat([part.bias for part in parts], dim=-1), parts[0].length)

    def at(self, row: Tensor, length: Tensor) -> "PastEntries":
        """Return the entries of rows `[A]` int64 after `length` committed tokens each, `[A]` int64, as A rows."""
        position = torch.arange(self.bias.shape[-1], device=length.device)
        bias = _hide(position >= length[:, None] - 1)[:, None, None]
        return PastEntries(EagleEntries(*(part[row] for part in self.entries)), bias, length)


class _Layer(nn.Module):
    """The weights of the decoder layer, which `EagleDrafter` computes."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        width, eps = config.width, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        # Queries, keys and values read joined inputs `[e; h]`.
        self.self_attn, self.mlp = AttentionProducts(2 * width, config, config.qk_norm), GatedMLP(config)


@register_drafter("EAGLE-3 head", "redrafter_eagle3")
class EagleDrafter(TrainableDrafter):
    """An EAGLE-3 head; the target's embedding table is shared, unless the head has a table."""

    config_class = EagleConfig
    config: EagleConfig
    identity_fields = ("model_type", "hidden_size", "vocab_size", "draft_vocab_size")

    def __init__(self, config: EagleConfig):
        """Make a head with random weights; see `DrafterModel`."""
        super().__init__(config)
        joined, eps = config.num_target_layers * config.hidden_size, config.rms_norm_eps
        self.input_norm = nn.RMSNorm(joined, eps) if config.norm_before_fc else None
        norms = (nn.RMSNorm(config.hidden_size, eps) for _ in range(config.num_target_layers))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(joined, config.width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.width, eps)
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size or config.vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if config.own_embedding else None
        self.post_init()

    def stored_layer(self, target: Target, compiled: bool) -> DrafterLayer:
        """Return the layer that the head stores of every token: the token's terms of two entries."""
        heads, compute = 2 * self.config.num_key_value_heads, partial(_remember, self, target.embedding)
        return drafter_layer(self, target, heads, self.config.head_dim, compute)

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the weights that a draft of `depth` search steps reads."""
        fused = layer_bytes(self.fc)
        table = 0 if self.embed_tokens is None else self.embed_tokens.weight.nbytes
        return depth * (sum(weight.nbytes for weight in self.parameters()) - fused - table) + fused

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
            parts = outputs.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            outputs = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(outputs)
        return fused

    def remember(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the terms of tokens in keys and values, `[..., 2H, d]` each.

        The first H heads are the term of a token's hidden state in its own entry, the other H the term of its embedding
        in the entry before.

        Args:
            embedding: The embeddings of the tokens, `[..., D]`.
            hidden: Their hidden states as `fuse_hidden` returns them, `[..., D]`.
        """
        layer, attention, width = self.midlayer, self.midlayer.self_attn, self.config.width
        e, h = layer.input_layernorm(embedding), layer.hidden_norm(hidden)
        keys, values = (
            torch.cat(
                [
                    partial_linear(product, h, slice(width, None), with_bias=True),
                    partial_linear(product, e, slice(width), with_bias=False),
                ],
                dim=-1,
            )
            for product in (attention.k_proj, attention.v_proj)
        )
        return attention.by_head(keys), attention.by_head(values)

    def read_past(self, keys: Tensor, values: Tensor, length: Tensor, first: int = 0) -> PastEntries:
        """Return the entries of committed tokens that have a committed token after them.

        Args:
            keys: Terms of S + 1 successive tokens of each row to add to keys, `[B, S + 1, 2H, d]`.
            values: Terms to add to values, `[B, S + 1, 2H, d]`.
            length: Committed tokens of each row, `[B]` int64.
            first: Position of the first of these tokens.
        """
        heads = self.config.num_key_value_heads
        position = torch.arange(first, first + keys.shape[1] - 1, device=keys.device)  # [S]
        # An entry's product reads [embedding of token i + 1; hidden state of token i], and a product of joined inputs
        # is the sum of a product of each: so each token's two terms are stored once, and added here.
        key, value = (x[:, :-1, :heads] + x[:, 1:, heads:] for x in (keys, values))
        bias = _hide(position >= length[:, None] - 1)[:, None, None]
        return PastEntries(EagleEntries(self.midlayer.self_attn.finish_key(key, position), value), bias, length)

    def step(
        self, embedding: Tensor, hidden: Tensor, position: Tensor, path: EagleEntries | None, past: PastEntries
    ) -> tuple[Tensor, Tensor, EagleEntries]:
        """Compute one entry of each of w beams, and the logits of the token after it.

        Args:
            embedding: The embedding of each beam's last token, `[B, w, D]`.
            hidden: The hidden state of the token before it, fused from the target's or drafted, `[B, w, D]`.
            position: Position of that token, `[B, w]` int64, or `[B, 1]` where it is the same for all beams.
            path: The entries that were drafted before on each beam, `[B, w, k, H, d]`; None for none.
            past: The entries of the committed tokens.

        Returns:
            Logits `[B, w, V']` over the head's vocabulary, the drafted hidden states `[B, w, D]`, and the entries of
            each beam with the new one at the end.
        """
        x, hidden, path = self.advance(embedding, hidden, position, path, past)
        return self.score(x), hidden, path

    forward = step

    def advance(
        self, embedding: Tensor, hidden: Tensor, position: Tensor, path: EagleEntries | None, past: PastEntries
    ) -> tuple[Tensor, Tensor, EagleEntries]:
        """Make one step without its last product, for the same arguments as `step`.

        Returns:
            The input of `lm_head` and the drafted hidden states, `[B, w, D]` each, and the entries of each beam.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        e, h = layer.input_layernorm(embedding), layer.hidden_norm(hidden)
        joined = torch.cat([e, h], dim=-1)
        query, key, value = (
            attention.by_head(product(joined)) for product in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = attention.finish_query(query, position), attention.finish_key(key, position)
        new = EagleEntries(key[:, :, None], value[:, :, None])
        if path is not None:
            new = EagleEntries(*(torch.cat(pair, dim=2) for pair in zip(path, new, strict=True)))
        residual = h if self.config.norm_before_residual else hidden
        x = residual + attention.o_proj(_attend(query, new, past))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x, new

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
        past = self.read_past(*self.remember(embedding, fused), torch.full_like(tokens[:, 0], length))
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
        """Return a function of the entries before positions of texts; see `ReplayableDrafter.read_texts`."""
        if self.embed_tokens is not None:
            embedding = self.embed_tokens(tokens)
        stored = self.remember(embedding, self.fuse_hidden(hidden))
        return self.read_past(*stored, torch.full_like(tokens[:, 0], tokens.shape[1])).at

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
    rows, beams, heads, size = query.shape
    groups, steps = past.entries.keys.shape[2], path.keys.shape[2]
    query = query.view(rows, beams, groups, heads // groups, size) * size**-0.5
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


ENTRIES_AT_ONCE = 512  # entries of a row; bounds the memory for reading them, in addition to the result


@dataclass(frozen=True)
class EagleProposer(SearchProposer):
    """Drafts with an EAGLE-3 head; has the attributes of `SearchProposer`.

    Keys and values of committed tokens are read from the target's cache; those of drafts live as long as the search.
    """

    drafter: EagleDrafter

    def read_context(self, state: State, cache: KVCache) -> PastEntries:
        """Return the entries of the rows' committed tokens."""
        parts, count, length = [], cache.window - 1, state.length
        for first in range(0, count, ENTRIES_AT_ONCE):
            position = torch.arange(first, min(first + ENTRIES_AT_ONCE, count) + 1, device=length.device)
            stored = cache.read_drafter_layer(position.expand(len(length), -1))
            parts.append(self.drafter.read_past(*stored, length, first))
        return PastEntries.join(parts)

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: PastEntries) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        head = self.drafter
        carried = head.fuse_hidden(state.hidden)[:, None]  # [B, w, D], the hidden state that each beam reads
        path: EagleEntries | None = None  # the drafts of each beam

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried, path
            if path is not None:
                carried = of_beams(carried, sources)
                path = EagleEntries(*(of_beams(part, sources) for part in path))
            embedding, position = head.embed(tokens, self.target.embedding), (context.length - 1 + k)[:, None]
            logits, carried, path = head.step(embedding, carried, position, path, context)
            return sampler.draft_scores(logits, noise, k, head.draft_ids)

        return expand


EagleDrafter.proposer_class = EagleProposer


def _remember(
    head: EagleDrafter, embedding: nn.Module, ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    return head.remember(head.embed(ids, embedding), head.fuse_hidden(hidden))
