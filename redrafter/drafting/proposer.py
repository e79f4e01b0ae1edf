"""The interface of all proposers, the state of the rows that a step starts from, and proposers that search a tree."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Generic, NamedTuple, Protocol

from torch import Tensor, nn
from typing_extensions import TypeVar  # which has a default, as that of `typing` does from Python 3.13 on

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.features import Feature
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.beam_search import Expand, beam_search
from redrafter.tree.token_tree import Tree, chain


class Likelihoods(NamedTuple):
    """The likelihoods of the drafts of a row that a search finds.

    Attributes:
        first_level: Those of its first level, as pairs of a likelihood and a mean number.
        deeper: Number of drafts in each further level relative to the level above.
    """

    first_level: tuple[tuple[float, float], ...]
    deeper: float = 0.65


# Measured with the boxed pair, whose best drafts are right in 0.65.
TRAINED = Likelihoods((
    (0.95, 0.3), (0.82, 0.13), (0.67, 0.11), (0.52, 0.11), (0.38, 0.09),
    (0.27, 0.13), (0.18, 0.34), (0.11, 0.6), (0.06, 1.0), (0.02, 0.85), (0.004, inf),
))  # fmt: skip


@dataclass(frozen=True)
class State:
    """The rows of a batch between two steps.

    A row's n committed tokens have their keys and values in the cache. Its pending token, at position n, is known but
    not in the cache yet.

    Attributes:
        tokens: Each row's text by position, without padding, `[B, T]` int64; written in place, as the cache is.
        length: Committed tokens n of each row, `[B]` int64.
        hidden: The target's hidden state that produced the pending token, `[B, F]`.
        active: Rows that a step advances, `[B]` bool; others are unchanged.
        inputs: The number of each row that a feature of the target reads, as in `ForwardBatch`.
    """

    tokens: Tensor
    length: Tensor
    hidden: Tensor
    active: Tensor
    inputs: Mapping[Feature, Tensor] = field(default_factory=dict)

    @property
    def pending(self) -> Tensor:
        """The pending token of each row, `[B, 1]` int64."""
        return self.tokens.gather(1, self.length[:, None])

    def at(self, rows: Tensor | slice) -> "State":
        """Return the state of rows `rows`, `[B']` int64 or a slice, alone."""
        inputs = {feature: x[rows] for feature, x in self.inputs.items()}
        return State(self.tokens[rows], self.length[rows], self.hidden[rows], self.active[rows], inputs)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, whose first dimension is that of the rows."""
        return [self.tokens, self.length, self.hidden, self.active, *self.inputs.values()]


class Proposer(Protocol):
    """Drafts the tree that a step verifies.

    The size of the tree is fixed, and so are all shapes of a step.
    """

    @property
    def nodes(self) -> int:
        """N, the nodes of the tree, the pending token included."""

    @property
    def depth(self) -> int:
        """K, the most levels of drafts below the pending token."""

    @property
    def beams(self) -> int:
        """W, beams of the search for drafts; 0 without a search."""

    @property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to."""

    @property
    def model(self) -> Target | None:
        """The draft model, which has a separate KV cache; None for a proposer without one."""

    @property
    def shared_nodes(self) -> int | None:
        """Nodes that all rows of a step share, the likeliest ones; None for N in each row."""

    @property
    def without_text(self) -> "Proposer | None":
        """Return the same proposer without drafts copied from the sequence; None if it copies none."""

    @property
    def sizes(self) -> dict[str, int] | None:
        """Sizes of a step's drafts, by the names of their options; None without drafts."""

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree whose root is each row's pending token.

        Args:
            state: The rows' texts, pending tokens and hidden states.
            sampler: How the target will draw.
            noise: The noise that the target will draw with, by depth, `[B, K+1, V]`; None if greedy.
            cache: The target's keys and values, and its drafter's entries.
            draft_cache: The keys and values of `model`; None without a model.
        """


class UndraftedProposer:
    """Drafts nothing: undrafted decoding, in the same engine."""

    nodes, depth, beams, scratch_slots = 1, 0, 0, 1
    model = shared_nodes = without_text = sizes = None

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Return the pending token alone."""
        return chain(state.pending)


UNDRAFTED = UndraftedProposer()


def step_tokens(proposer: Proposer, rows: int) -> int:
    """Return the number of tree tokens in the forward of a step of `rows` rows."""
    nodes = rows * proposer.nodes
    return nodes if proposer.shared_nodes is None else min(nodes, max(rows, proposer.shared_nodes))


class PricedDrafter(nn.Module):
    """Interface of every searched drafter: its ids, and the cost of a draft.

    Attributes:
        config: Its architecture.
        draft_ids: The target's id of each of the drafter's ids, `[V']` int64; None where it has all ids.
    """

    config: AnyDrafterConfig
    draft_ids: Tensor | None

    def part_reads(self, depth: int) -> Mapping[str, float]:
        """Return how often a draft of `depth` search steps reads parts of the drafter, by the beginning of their names.

        It reads other weights at each step. "target.head" is the head of the target.
        """
        return {}

    def draft_bytes(self, depth: int) -> int:
        """Return the bytes of the drafter's own weights that a draft of `depth` search steps reads."""
        total, reads = 0.0, self.part_reads(depth).items()
        for name, weight in self.named_parameters():
            total += weight.nbytes * next((times for part, times in reads if name.startswith(part)), depth)
        return round(total)


Context = TypeVar("Context", default=Any)
"""A drafter's entries of the rows' committed tokens, which `SearchProposer.read_context` hands to `scores`."""


@dataclass(frozen=True)
class SearchProposer(Generic[Context]):
    """Drafts by beam search with a drafter, and keeps the best nodes. A subclass says how the drafter scores tokens.

    Attributes:
        drafter: The drafter.
        target: The target, whose embedding table the drafter shares.
        beams: W, beams of the search.
        depth: K, steps of the search.
        nodes: N, most nodes of a row's tree, the pending token included.
        shared_nodes: Nodes that all rows of a step share, the likeliest ones; None for N in each row.
        compiled: Whether to run the drafter's step through torch.compile, which takes some seconds at its first use.
        stores_drafts: Whether the search stores entries of drafts in the slots after the committed tokens.
    """

    stores_drafts: ClassVar[bool] = False

    drafter: PricedDrafter
    target: Target
    beams: int
    depth: int
    nodes: int
    shared_nodes: int | None = None
    compiled: bool = False

    model = without_text = None  # a drafter's entries are stored in the target's cache
    likelihoods: ClassVar[Likelihoods] = TRAINED
    sampled_likelihoods: ClassVar[Likelihoods | None] = None  # of steps that sample, where drafts are less likely then
    gains_unevenly: ClassVar[bool] = False  # whether some texts gain much more than others
    least_score: float | None = None  # `least` of `beam_search`

    def likelihoods_of(self, *, sampled: bool) -> Likelihoods:
        """Return the likelihoods of drafts, in steps that sample or in others."""
        return (self.sampled_likelihoods if sampled else None) or self.likelihoods

    @cached_property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to: verification, or before it the search."""
        return max(self.nodes, self.searched if self.stores_drafts else 0)

    @property
    def searched(self) -> int:
        """Tokens of a row that a search reads: the pending one, and the drafts of all levels but the last."""
        return 1 + (self.depth - 1) * self.beams

    @property
    def sizes(self) -> dict[str, int]:
        """Beams, depth and nodes."""
        return {"num_beams": self.beams, "draft_len_per_beam": self.depth, "nodes": self.nodes}

    @property
    def draft_bytes(self) -> int:
        """Bytes of the weights that a draft reads, of the drafter and of the target's head."""
        head = sum(weight.nbytes for weight in self.target.head.state_dict().values())
        reads = self.drafter.part_reads(self.depth).get("target.head", 0)
        return self.drafter.draft_bytes(self.depth) + round(reads * head)

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft a tree by beam search; see `Proposer.propose`."""
        return self.grow(state, sampler, self.scores(state, sampler, noise, self.read_context(state, cache)))

    def read_context(self, state: State, cache: KVCache) -> Context:
        """Return the drafter's entries of the rows' committed tokens; None where it has none."""
        raise NotImplementedError

    def scores(self, state: State, sampler: Sampler, noise: Tensor | None, context: Context) -> Expand:
        """Return the function that scores the next tokens of every beam, over the drafter's vocabulary.

        Args:
            state: The rows' texts, pending tokens and hidden states.
            sampler: How the target will draw.
            noise: The noise that the target will draw with, by depth, `[B, K+1, V]`; None if greedy.
            context: The drafter's entries of the committed tokens, as `read_context` returns it.
        """
        raise NotImplementedError

    def grow(
        self, state: State, sampler: Sampler, expand: Expand, on_level: Callable[[Tensor], object] | None = None
    ) -> Tree:
        """Search a tree whose root is each row's pending token.

        Args:
            state: The rows' texts and pending tokens.
            sampler: How the target will draw.
            expand: Scores the next tokens of every beam, over the drafter's vocabulary.
            on_level: As in `beam_search`.
        """
        # Rows that take no drafts must not spend shared nodes, nor enter the acceptance statistics.
        limits = state.active * (self.depth if sampler.draft_limits is None else sampler.draft_limits)  # [B]
        return beam_search(
            state.pending[:, 0],
            expand,
            beams=self.beams,
            depth=self.depth,
            nodes=self.nodes,
            ids=self.drafter.draft_ids,
            limits=limits,
            # Each row needs a node at least, its root.
            shared=None if self.shared_nodes is None else max(self.shared_nodes, len(limits)),
            least=self.least_score,
            on_level=on_level,
        )
