"""Proposers that the pair is compared with. None of them changes an output; they differ in how much is accepted."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class Uncoupled:
    """The lattice, searched at the target's temperature but without its noise."""

    inner: RecurrentProposer

    model = shared_nodes = without_text = sizes = None

    @property
    def scratch_slots(self) -> int:
        """Slots behind a row's committed ones that a step writes to."""
        return self.inner.scratch_slots

    @property
    def nodes(self) -> int:
        """Nodes of a tree, the root counted."""
        return self.inner.nodes

    @property
    def depth(self) -> int:
        """Depth of a tree, the root not counted."""
        return self.inner.depth

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Propose a tree without looking at the noise."""
        unseen = None if noise is None else torch.zeros_like(noise)
        return self.inner.propose(state, sampler, unseen, cache, draft_cache)


@dataclass(frozen=True)
class FinalBeams(Uncoupled):
    """The published method: only those nodes of the lattice that lead to a beam of the last step, uncoupled.

    The other nodes stay in place, so that shapes do not change, with a token that is never drawn.

    Attributes:
        never: Id of that token.
    """

    never: int

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Propose the lattice with the tokens of all nodes but the final beams' prefixes replaced by `never`."""
        tree = super().propose(state, sampler, noise, cache, draft_cache)
        prefix = tree.ancestors[:, -self.inner.beams :].any(dim=1)  # [B, N]
        return replace(tree, tokens=torch.where(prefix, tree.tokens, self.never))
