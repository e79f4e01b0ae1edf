"""The proposer that drafts with a layer for multi-token prediction (MTP), which the target's own checkpoint holds.

The layer is a decoder layer of the target's class. Its entry of position p reads the target's hidden state there and
the token after it, and predicts the token after that one (Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437). Applied again to its own output and the token that it drafted, it drafts further ones.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.cache.dense import CACHE_NAME, cache_argument
from redrafter.cache.kv_cache import KVCache, LayerShape
from redrafter.drafting.decoder_parts import of_beams
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel, compile_once, for_any_tokens, mark_dynamic
from redrafter.drafting.drafter_types import register_drafter
from redrafter.drafting.mtp_attention import Made, Past, Recording
from redrafter.drafting.paged_entries import PagedEntries, with_themselves
from redrafter.drafting.proposer import SearchProposer, State
from redrafter.errors import UnsupportedError, first_line, warn
from redrafter.model.forward_batch import DrafterLayer
from redrafter.model.target import Target
from redrafter.parallel.local_shards import GatheredLinear
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand

PAST = 1024  # entries of the text that a draft attends to, the nearest ones; bounds what a GPU reads of the cache


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


@register_drafter()
class MTPDrafter(DrafterModel):
    """An MTP layer; the target's embedding table and head are shared.

    Attributes:
        is_compilable: Whether its decoder layers can be compiled.
    """

    is_compilable = True
    config_class = MTPConfig
    config: MTPConfig
    made_from_config = False

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
        hidden = torch.zeros(1, self.config.hidden_size, dtype=target.dtype, device=target.device)
        with torch.no_grad():
            keys, values = self.remember(target.embedding, one, one, hidden)
        remember: Callable[..., tuple[Tensor, Tensor]] = partial(self.remember, target.embedding)
        if compiled:
            remember = for_any_tokens(partial(_run_compiled, self, MTPDrafter.remember, target.embedding))
        widths = keys.shape[2], values.shape[2], target.dtype, target.device
        shape = LayerShape(keys.shape[1], *widths, of_drafter=True, extra_dim=self.config.hidden_size)
        return DrafterLayer(self, shape, remember)

    def check_search(self, target: Target, depth: int) -> None:
        """Raise `UnsupportedError` for a target whose head the layer cannot share."""
        if not isinstance(target.head, nn.Linear | GatheredLinear):
            raise UnsupportedError(
                f"{target.name} has a head of the type {type(target.head).__name__}, which its MTP layer cannot share "
                "yet: decode without drafts (--no-speculate), or give a drafter"
            )

    def placed(self, target: Target) -> DrafterModel:
        """Return the layer on a target's device, in the dtypes that it was loaded in."""
        module: Any = self
        return module.to(target.device).eval()

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft reads the target's head, at each step; all experts count, as a large tree needs."""
        return {"target.head": depth}

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

    def remember(self, table: nn.Module, ids: Tensor, positions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values that are stored of T tokens, `[T, H, d]` each.

        Args:
            table: The target's embedding table.
            ids: The tokens, `[T]` int64.
            positions: Their positions, `[T]` int64.
            before: The target's hidden state of the token before each, `[T, D]`.
        """
        position, recording = (positions - 1).clamp(min=0), Recording([])  # of a text's first token nothing is read
        try:  # noqa: SIM105  # a compiler traces no context of `suppress`
            self.run_blocks(self.join(self.embed(ids, position, table), before)[None], position[None], recording)
        except Made:
            pass
        if not recording.made:
            raise UnsupportedError(
                f"{type(self.blocks[0]).__name__} does not attend through transformers' attention interface, so it "
                "cannot be an MTP layer here"
            )
        keys, values = (x[0].transpose(0, 1).to(before.dtype) for x in recording.made[0])  # [T, H, d]
        return keys, values

    def step(self, inputs: Tensor, position: Tensor, past: Past) -> Tensor:
        """Compute entries of w beams, and store them after those of the text and of earlier drafts.

        Args:
            inputs: Inputs of the decoder layer, `[B, w, D]`.
            position: Their positions, `[B, w]` int64.
            past: Where entries are, and which of them the beams see.

        Returns:
            The normed output, `[B, w, D]`: what the head reads, and in place of the target's hidden state the next
            entry.
        """
        normed: Tensor = self.norm(self.run_blocks(inputs, position, past))
        return normed

    forward = step

    def run_blocks(self, x: Tensor, position: Tensor, past: Past | Recording) -> Tensor:
        """Run the decoder layers on their inputs `[B, w, D]` at positions `[B, w]`, and return the output, `[B, w, D]`.

        The layers pass `past` on to `attend_to_past`.
        """
        # Of ropes with sections for images, which text counts alike, older versions of transformers take all three.
        positions = position.expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else position
        rope = {} if self.rotary is None else {"position_embeddings": self.rotary(x, positions)}
        for block, cache_name in zip(self.blocks, self._cache_names, strict=True):
            named = {cache_name: None, "past": past}
            output = block(x, attention_mask=None, position_ids=position, **named, **rope)
            x = output[0] if isinstance(output, tuple) else output
        return x


@dataclass(frozen=True)
class MTPProposer(SearchProposer[PagedEntries]):
    """Drafts with an MTP layer; the attributes are those of `SearchProposer`.

    Keys and values of committed tokens are in the target's cache. Those of drafts live as long as the search, in the
    slots after the committed tokens.
    """

    drafter: MTPDrafter
    stores_drafts = True

    def read_context(self, state: State, cache: KVCache) -> PagedEntries:
        """Return the entries of the rows' committed tokens."""
        return PagedEntries.from_cache(cache, state.length)

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: PagedEntries) -> Expand:
        """Return the function that scores the next tokens of every beam; see `SearchProposer.scores`."""
        layer, head, table, length = self.drafter, self.target.head, self.target.embedding, state.length
        step = partial(_run_compiled, layer, _step) if self.compiled else partial(_step, layer)
        count, levels = len(length), torch.arange(self.depth, device=length.device)
        position = length - 1 + levels[:, None]  # [K, B]
        carried = state.hidden[:, None]  # [B, w, D], of each beam
        seen: Tensor | None = None  # [B, w, n + w], entries of each beam; None in a chain, which sees all
        # A chain sees all drafts before, as it sees committed tokens.
        one = torch.ones(count, 1, 1, dtype=torch.bool, device=length.device)
        chain, lengths = context.rows(one, levels[:1].expand(count, 1)), context.length + levels[:, None]

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried, seen
            if self.beams > 1:
                if seen is not None:
                    carried, seen = of_beams(carried, sources), of_beams(seen, sources)
                seen = with_themselves(seen, count, tokens.shape[1], carried.device)
                rows = context.rows(seen, levels[k].expand(count, seen.shape[2]))
            else:
                rows = chain._replace(length=lengths[k])
            # As one row, so that a compiled function serves any number of rows and beams.
            own = position[k][:, None].expand_as(tokens)
            by_token = tokens.reshape(1, -1), carried.reshape(1, -1, carried.shape[-1]), own.reshape(1, -1)
            if self.compiled:
                mark_dynamic(by_token, 1)
                mark_dynamic(rows, 0)
            made: Tensor = step(table, *by_token, Past(context, rows, 1 + PAST))
            carried = made.view_as(carried)
            # Not by a call of the head, which may have hooks while another thread uses the target.
            logits = type(head).forward(head, carried)
            return sampler.draft_scores(logits, noise, k, None)

        return expand


MTPDrafter.proposer_class = MTPProposer


def _step(layer: MTPDrafter, table: nn.Module, tokens: Tensor, carried: Tensor, position: Tensor, past: Past) -> Tensor:
    """Compute entries of w beams of each of B rows, one row after another.

    Args:
        layer: The MTP layer.
        table: The target's embedding table.
        tokens: Last token of each beam, `[1, B w]` int64.
        carried: The hidden state before it, `[1, B w, D]`.
        position: The position of that, `[1, B w]` int64.
        past: Where entries are, and which of them the beams see.

    Returns:
        What `MTPDrafter.step` returns, `[1, B w, D]`.
    """
    inputs = layer.join(layer.embed(tokens, position, table), carried)
    return layer.step(inputs, position.clamp(min=0), past)


def _run_compiled(layer: MTPDrafter, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of an MTP layer, compiled where that is possible."""
    if layer.is_compilable:
        try:
            return compile_once(function)(layer, *arguments)
        except Exception as error:
            if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            layer.is_compilable = False
            warn(f"the MTP layer cannot be compiled ({first_line(error)}): its drafts are slower")
    return function(layer, *arguments)
