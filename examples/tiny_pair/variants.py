"""Ways of proposing that the pair is compared with. None of them changes an output; they differ in how often they
hit."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import State
from redrafter.drafting.recurrent import RecurrentProposer
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class Uncoupled:
    """The lattice, searched at the target's temperature but without looking at its noise."""

    inner: RecurrentProposer

    model = None

    @property
    def scratch(self) -> int:
        return self.inner.scratch

    @property
    def nodes(self) -> int:
        return self.inner.nodes

    @property
    def depth(self) -> int:
        return self.inner.depth

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None = None) -> Tree:
        return self.inner.propose(state, sampler, None if noise is None else torch.zeros_like(noise))


@dataclass(frozen=True)
class FinalBeams(Uncoupled):
    """The published method: of the lattice, only prefixes of the beams that survive to the last step, uncoupled.

    The other nodes stay in place, so that shapes do not change, with a token that is never drawn. never: its id.
    """

    never: int

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None = None) -> Tree:
        tree = super().propose(state, sampler, noise)
        prefix = tree.ancestors[:, -self.inner.beams :].any(dim=1)  # [B, N]
        return replace(tree, tokens=torch.where(prefix, tree.tokens, self.never))
