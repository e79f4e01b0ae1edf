"""The proposer that drafts with an EAGLE-3 head."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from redrafter.cache.paged import KVCache
from redrafter.drafting.eagle_drafter import EagleDrafter, EagleEntries, PastEntries
from redrafter.drafting.proposer import State
from redrafter.drafting.search_proposer import SearchProposer
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree

__all__ = ["EagleProposer", "remember"]

ENTRIES_AT_ONCE = 512  # of a row; bounds what reading the text takes beside its result


@dataclass(frozen=True)
class EagleProposer(SearchProposer):
    """Drafts with an EAGLE-3 head; the attributes are those of `SearchProposer`.

    Keys and values of committed tokens are read from the target's cache; those of drafts live as long as the search.
    """

    drafter: EagleDrafter

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        head = self.drafter
        past = self.read_past(cache, state.length)
        carried = head.fuse_hidden(state.hidden)[:, None]  # [B, w, D], the hidden state that each beam reads
        path: EagleEntries | None = None  # what was drafted on each beam

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried, path
            if path is not None:
                carried = _of_beams(carried, sources)
                path = EagleEntries(*(_of_beams(part, sources) for part in path))
            embedding = head.embed(tokens, self.target.embedding)
            logits, carried, path = head.step(embedding, carried, (state.length - 1 + k)[:, None], path, past)
            return sampler.draft_scores(logits, noise, k, head.draft_ids)

        return self.grow(state, sampler, expand)

    def read_past(self, cache: KVCache, length: Tensor) -> PastEntries:
        """Return the entries of the committed tokens of rows with `length` `[B]` int64 of them."""
        parts, count = [], cache.window - 1
        for first in range(0, count, ENTRIES_AT_ONCE):
            position = torch.arange(first, min(first + ENTRIES_AT_ONCE, count) + 1, device=length.device)
            stored = cache.read_drafter_layer(position.expand(len(length), -1))
            parts.append(self.drafter.read_past(*stored, length, first))
        return PastEntries.join(parts)


def _of_beams(x: Tensor, sources: Tensor) -> Tensor:
    """Return what belongs to some beams of the step before.

    Args:
        x: What belongs to each of w beams, `[B, w, ...]`.
        sources: The beams, `[B, W]` int64.
    """
    index = sources.view(*sources.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def remember(head: EagleDrafter, embedding: nn.Module) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the function that computes what a head stores of tokens; see `DrafterLayer.remember`.

    Args:
        head: The head.
        embedding: The target's embedding table.
    """
    return partial(_remember, head, embedding)


def _remember(
    head: EagleDrafter, embedding: nn.Module, ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    return head.remember(head.embed(ids, embedding), head.fuse_hidden(hidden))
