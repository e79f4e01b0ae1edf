"""The proposer that drafts with a recurrent drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.cache.paged import KVCache
from redrafter.drafting.context_attention import ContextWindow
from redrafter.drafting.drafter import DraftStart, RecurrentDrafter
from redrafter.drafting.proposer import State
from redrafter.drafting.search_proposer import SearchProposer
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree

__all__ = ["RecurrentProposer", "remember"]


@dataclass(frozen=True)
class RecurrentProposer(SearchProposer):
    """Drafts with a recurrent drafter; the attributes are those of `SearchProposer`."""

    drafter: RecurrentDrafter

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        window = None if self.drafter.context is None else self.read_window(state.length, cache)
        return self.search(state, sampler, noise, window=window)

    def read_window(self, length: Tensor, cache: KVCache) -> ContextWindow:
        """Return what the drafter remembers of the last committed tokens of rows with `length` `[B]` of them."""
        pairs = min(self.drafter.config.context_window or 0, cache.window)  # a row of the cache has no more
        return ContextWindow.read(length, pairs, cache.read_drafter_layer)

    def search(
        self,
        state: State,
        sampler: Sampler,
        noise: Tensor | None,
        should_stop: Callable[[Tensor], bool] | None = None,
        window: ContextWindow | None = None,
    ) -> Tree:
        """Draft a tree whose root is each row's pending token.

        Args:
            state: The rows' texts, pending tokens and hidden states.
            sampler: How the target will draw.
            noise: The noise that the target will draw with, by depth, `[B, K+1, V]`; None if greedy.
            should_stop: Ends the search early, as `beam_search` describes; None to search all steps.
            window: What the drafter reads of the committed tokens; None where it reads nothing.
        """
        carried: Tensor | None = None  # [B, w, D], the recurrent state of each beam
        start, ids = self.drafter.begin(self.drafter.fuse_hidden(state.hidden)[:, None]), self.drafter.draft_ids
        advance = _compiled_advance() if self.compiled else _advance

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            logits, carried = advance(self.drafter, self.target.embedding, tokens, sources, carried, start, k, window)
            return sampler.draft_scores(logits, noise, k, ids)

        return self.grow(state, sampler, expand, should_stop)


def _advance(
    drafter: RecurrentDrafter,
    embedding: nn.Module,
    tokens: Tensor,
    sources: Tensor,
    carried: Tensor | None,
    start: DraftStart,
    step: int,
    window: ContextWindow | None,
) -> tuple[Tensor, Tensor]:
    """Make one drafter step for every beam, from the recurrent state of the beam that it continues.

    Args:
        drafter: The recurrent drafter.
        embedding: The target's embedding table.
        tokens: Last token of each beam, `[B, w]` int64.
        sources: Beam of the previous step that each beam continues, `[B, w]` int64.
        carried: Recurrent states after the previous step, `[B, w', D]`; None at the first step.
        start: What all steps take from the target's hidden state, of each row `[B, 1, ...]`.
        step: Number of the step, from 0.
        window: What the drafter reads of the committed tokens; None where it reads nothing.

    Returns:
        Logits `[B, w, V']` and the new recurrent states `[B, w, D]`.
    """
    if carried is not None:
        carried = carried.gather(1, sources[:, :, None].expand(-1, -1, carried.shape[-1]))
    read = None if window is None else partial(drafter.read_context, step, window)
    return drafter.step(embedding(tokens), carried, start, read)


@cache
def _compiled_advance() -> Any:
    """Return `_advance` compiled, once for all proposers."""
    return torch.compile(_advance, dynamic=True)


def remember(drafter: RecurrentDrafter, embedding: nn.Module, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that computes what a drafter stores of tokens; see `DrafterLayer.remember`.

    Args:
        drafter: A drafter that attends to committed tokens.
        embedding: The target's embedding table.
        compiled: Whether to run it through torch.compile.
    """
    return partial(_compiled_remember() if compiled else _remember, drafter, embedding)


def _remember(
    drafter: RecurrentDrafter, embedding: nn.Module, ids: Tensor, positions: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    assert drafter.context is not None
    return drafter.context.remember(drafter.fuse_hidden(hidden), embedding(ids), positions)


@cache
def _compiled_remember() -> Any:
    """Return `_remember` compiled, once for all proposers."""
    return torch.compile(_remember, dynamic=True)
