"""What a step asks of whatever proposes its tree, and the state of the rows that it is given."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.token_tree import Tree, chain

__all__ = ["PlainProposer", "Proposer", "State"]


@dataclass(frozen=True)
class State:
    """Where `B` rows stand. A row's committed tokens are in the cache; its pending token is known, not yet cached.

    tokens: `[B, T]` int64, each row's own text by position, without padding; written in place, as the cache is.
    length: `[B]` int64, committed tokens n; the pending token is `tokens[b, n]`.
    hidden: `[B, F]`, the target's hidden state that produced the pending token.
    active: `[B]` bool; a row that is not stands still.
    """

    tokens: Tensor
    length: Tensor
    hidden: Tensor
    active: Tensor

    @property
    def pending(self) -> Tensor:
        """`[B, 1]` int64."""
        return self.tokens.gather(1, self.length[:, None])

    def at(self, rows: Tensor) -> "State":
        """These rows alone; rows: `[B']` int64."""
        return State(self.tokens[rows], self.length[rows], self.hidden[rows], self.active[rows])

    def with_active(self, active: Tensor) -> "State":
        """The same, with other rows active."""
        return replace(self, active=active)


class Proposer(Protocol):
    """What proposes a tree of `nodes` = N nodes at most `depth` = K deep. Both are fixed, so every shape of a step
    is.

    scratch_slots: slots behind a row's committed ones that a step writes to.
    model: the LM that proposes, whose keys and values of the same rows are then `cache`; None for what keeps none.
    """

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def scratch_slots(self) -> int: ...

    @property
    def model(self) -> Target | None: ...

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None) -> Tree: ...


class PlainProposer:
    """Proposes nothing: plain decoding, in the same engine."""

    nodes, depth, scratch_slots, model = 1, 0, 1, None

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None) -> Tree:
        return chain(state.pending)
