"""The recurrent drafter as a proposer of trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.cache.paged import KVCache
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.beam_search import beam_search
from redrafter.tree.token_tree import Tree

__all__ = ["RecurrentProposer"]


@dataclass(frozen=True)
class RecurrentProposer:
    """Beam search with a drafter's `step`: `beams` = W wide, `depth` = K deep, cut to the `nodes` = N best nodes.

    compiled: run the drafter's step as torch.compile makes it, at the cost of some seconds at its first use.
    """

    drafter: RecurrentDrafter
    target: Target
    beams: int
    depth: int
    nodes: int
    compiled: bool = False

    model = None  # its drafter keeps no keys and values

    @property
    def scratch_slots(self) -> int:
        return self.nodes

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None = None) -> Tree:
        return self.search(state, sampler, noise)

    def search(
        self, state: State, sampler: Sampler, noise: Tensor | None, should_stop: Callable[[Tensor], bool] | None = None
    ) -> Tree:
        """The tree after each row's pending token. should_stop: as `beam_search` asks it."""
        carried: Tensor | None = None  # [B, w, D], the recurrence of each beam
        hidden, ids = self.drafter.fuse_hidden(state.hidden)[:, None], self.drafter.draft_ids
        advance = _compiled_advance() if self.compiled else _advance

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            nonlocal carried
            logits, carried = advance(self.drafter, self.target.embedding, tokens, sources, carried, hidden)
            return sampler.draft_scores(logits, noise, k, ids)

        return beam_search(
            state.pending[:, 0],
            expand,
            beams=self.beams,
            depth=self.depth,
            nodes=self.nodes,
            ids=ids,
            should_stop=should_stop,
        )


def _advance(
    drafter: RecurrentDrafter,
    embedding: nn.Module,
    tokens: Tensor,
    sources: Tensor,
    carried: Tensor | None,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """One drafter step of every beam, from the recurrence of the beam that it continues. tokens, sources: `[B, w]`;
    carried: `[B, w', D]`; hidden: `[B, 1, D]`. Returns logits `[B, w, V']` and the new recurrence `[B, w, D]`."""
    if carried is not None:
        carried = carried.gather(1, sources[:, :, None].expand(-1, -1, carried.shape[-1]))
    return drafter.step(embedding(tokens), carried, hidden)


@cache
def _compiled_advance() -> Any:
    return torch.compile(_advance, dynamic=True)
