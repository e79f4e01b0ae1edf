"""The base class of proposers that search a tree with a drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.beam_search import Expand, beam_search
from redrafter.tree.token_tree import Tree

__all__ = ["SearchProposer"]


@dataclass(frozen=True)
class SearchProposer:
    """Drafts by beam search with a drafter, and keeps the best nodes. A subclass says how the drafter scores tokens.

    Attributes:
        drafter: The drafter.
        target: The target, whose embedding table the drafter shares.
        beams: W, beams of the search.
        depth: K, steps of the search.
        nodes: N, most nodes of a row's tree, the pending token included.
        shared_nodes: Nodes that all rows of a step share, the likeliest ones; None for N in each row.
        compiled: Whether to run the drafter's step through torch.compile, which takes some seconds at its first use.
    """

    drafter: Any
    target: Target
    beams: int
    depth: int
    nodes: int
    shared_nodes: int | None = None
    compiled: bool = False

    model = None  # what a drafter stores of texts lies in the target's cache

    @property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to."""
        return self.nodes

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        raise NotImplementedError

    def grow(
        self, state: State, sampler: Sampler, expand: Expand, should_stop: Callable[[Tensor], bool] | None = None
    ) -> Tree:
        """Search a tree whose root is each row's pending token.

        Args:
            state: The rows' texts and pending tokens.
            sampler: How the target will draw.
            expand: Scores the next tokens of every beam, over the drafter's vocabulary.
            should_stop: Ends the search early, as `beam_search` describes; None to search all steps.
        """
        shared = None
        if self.shared_nodes is not None:
            eligible = state.active if sampler.plain is None else state.active & ~sampler.plain
            shared = max(self.shared_nodes, len(eligible)), eligible
        return beam_search(
            state.pending[:, 0],
            expand,
            beams=self.beams,
            depth=self.depth,
            nodes=self.nodes,
            ids=self.drafter.draft_ids,
            shared=shared,
            should_stop=should_stop,
        )
