"""The trees that `redrafter tune` tries, and the choice among what it measured."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.drafting.proposer import Proposer, SearchProposer

__all__ = [
    "DEEPER_LENGTHS",
    "LENGTHS",
    "SHARING_ROWS",
    "Timing",
    "at_size",
    "candidates",
    "choose",
    "deeper",
    "describe",
    "nodes_per_row",
    "shape_of",
    "step_costs",
    "table",
]

LENGTHS = (3, 5)  # draft lengths per beam that are tried
DEEPER_LENGTHS = (7, 10)  # tried one after the other, while a tree of the longest length so far is the fastest
NODE_BUDGETS = (4, 8, 16)  # tried beside all nodes of the lattice
SHARED_NODES_PER_ROW = (2, 4, 8)  # of trees whose rows share nodes, on average
SHARING_ROWS = 16  # rows from which on sharing nodes is tried; with fewer, each has nodes enough for what is likely
MIN_RATIO = 1.03  # times plain decoding's speed, for a tree to be chosen; less is noise


@dataclass(frozen=True)
class Timing:
    """One tree, or plain decoding, at one batch size.

    Attributes:
        batch: Rows in the batch.
        shape: The tree; None for plain decoding.
        tokens_per_step: New tokens of a row per step.
        step_ms: Median time of a step in milliseconds.
    """

    batch: int
    shape: TreeShape | None
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second, prefill excluded."""
        return 1000 * self.batch * self.tokens_per_step / self.step_ms

    def to_dict(self) -> dict[str, Any]:
        """Return the timing as JSON holds it, with its tokens per second."""
        shape = None if self.shape is None else self.shape.to_dict()
        return asdict(self) | {"shape": shape, "tokens_per_second": self.tokens_per_second}


def candidates(
    own: SearchProposer, beams: Sequence[int], lengths: Sequence[int], *, share: bool = False
) -> list[SearchProposer]:
    """Return the trees to try: every lattice at several node budgets, the pair's own first, then from small to large.

    Where rows may share nodes, there are also trees of which `SHARING_ROWS` rows do; `at_size` makes them for others.

    Args:
        own: The proposer that the pair uses now.
        beams: Numbers of beams to try; those above the drafter's vocabulary are left out.
        lengths: Draft lengths per beam to try.
        share: Whether rows may share nodes.
    """
    vocabulary = own.drafter.config.draft_vocab_size or own.drafter.config.vocab_size
    ordered = []
    for width in (width for width in beams if width <= vocabulary):
        for depth in lengths:
            is_own, lattice = (width, depth) == (own.beams, own.depth), 1 + width * depth
            budgets = {*NODE_BUDGETS, lattice} | ({own.nodes} if is_own else set())
            # With so few nodes that a shorter draft fills them, both are the same tree, and the shorter one is faster.
            fewest = max((length + 2 for length in lengths if length < depth), default=0)
            nodes = [n for n in sorted(budgets) if fewest <= n <= lattice or (is_own and n == own.nodes)]
            ordered += [(not is_own, n, replace(own, beams=width, depth=depth, nodes=n)) for n in nodes]
    if share:
        usable = [width for width in beams if width <= vocabulary]
        ordered += [
            (True, mean, tree) for mean in SHARED_NODES_PER_ROW for tree in _sharing(own, usable, lengths, mean)
        ]
    return [proposer for *_, proposer in sorted(ordered, key=lambda candidate: candidate[:2])]


def _sharing(own: SearchProposer, beams: Sequence[int], lengths: Sequence[int], mean: int) -> Iterator[SearchProposer]:
    """Yield trees whose rows share `mean` nodes for each: no wider than that, and as deep as doubling reaches."""
    for width in sorted({min(width, mean) for width in beams}):
        depth = min(max(lengths), mean.bit_length())
        yield replace(own, beams=width, depth=depth, nodes=1 + width * depth, shared_nodes=mean * SHARING_ROWS)


def deeper(own: SearchProposer, timings: Sequence[Timing], length: int) -> list[SearchProposer]:
    """Return the trees to try when drafting `length` tokens per beam, which is more than in any tree so far.

    They are as wide as the trees that are the fastest at a batch size and as deep as any; where none of the deepest is,
    still deeper ones are not worth the time. Each has as many nodes as that tree, or all of its lattice.

    Args:
        own: A proposer of the pair.
        timings: What was measured, plain decoding included.
        length: Draft length per beam.
    """
    measured = [timing.shape for timing in timings if timing.shape is not None]
    deepest = max((shape.draft_len_per_beam or 0 for shape in measured), default=0)
    sizes = set[tuple[int, int]]()
    for shape in choose(timings, set()).values():
        if shape is not None and shape.draft_len_per_beam == deepest and shape.shared_nodes is None:
            assert shape.num_beams
            assert shape.node_budget
            sizes |= {(nodes, shape.num_beams) for nodes in (shape.node_budget, 1 + shape.num_beams * length)}
    return [
        replace(own, beams=beams, depth=length, nodes=nodes, shared_nodes=None)
        for nodes, beams in sorted(sizes)
        if nodes > length  # fewer nodes reach no draft at that depth
    ]


def at_size(proposer: Proposer, rows: int) -> Proposer:
    """Return a proposer for a batch of `rows` rows: where these share nodes, as many for each as in other batches."""
    if not isinstance(proposer, SearchProposer) or proposer.shared_nodes is None:
        return proposer
    return replace(proposer, shared_nodes=proposer.shared_nodes * rows // SHARING_ROWS)


def shape_of(proposer: Proposer) -> TreeShape | None:
    """Return the shape of a proposer's tree; None for plain decoding."""
    if not isinstance(proposer, SearchProposer):
        return None
    return TreeShape(proposer.beams, proposer.depth, proposer.nodes, proposer.shared_nodes)


def describe(shape: TreeShape | None) -> str:
    """Return the shape of a tree as tables show it, such as `5 x 5, 26 nodes`; `off` for plain decoding."""
    if shape is None:
        return "off"
    nodes = f"{shape.node_budget} nodes" if shape.shared_nodes is None else f"{shape.shared_nodes} shared"
    return f"{shape.num_beams} x {shape.draft_len_per_beam}, {nodes}"


def nodes_per_row(shape: TreeShape | None, batch: int) -> int:
    """Return how many nodes a step verifies for each row of a batch, on average."""
    if shape is None:
        return 1
    assert shape.node_budget
    return shape.node_budget if shape.shared_nodes is None else shape.shared_nodes // batch


def choose(timings: Sequence[Timing], open_sizes: set[int]) -> dict[int, TreeShape | None]:
    """Return the fastest tree by batch size; None where none is `MIN_RATIO` times as fast as plain decoding.

    Args:
        timings: What was measured, plain decoding included.
        open_sizes: Batch sizes at which trees were left out for want of time. One of them at which no tree was measured
            is left out of the result.
    """
    shapes = {}
    for plain in (timing for timing in timings if timing.shape is None):
        best = _best(timings, plain.batch)
        if best is not None or plain.batch not in open_sizes:
            worth = best is not None and best.tokens_per_second >= MIN_RATIO * plain.tokens_per_second
            shapes[plain.batch] = best.shape if best is not None and worth else None
    return shapes


def _best(timings: Sequence[Timing], batch: int) -> Timing | None:
    trees = [timing for timing in timings if timing.batch == batch and timing.shape is not None]
    return max(trees, key=lambda timing: timing.tokens_per_second, default=None)


def step_costs(timings: Sequence[Timing], shapes: dict[int, TreeShape | None]) -> dict[int, float]:
    """Return the time of a step with each tree that was chosen, in steps of plain decoding, by batch size."""
    return {row["batch"]: row["step_cost"] for row in table(timings, shapes) if row["shape"] is not None}


def table(timings: Sequence[Timing], shapes: dict[int, TreeShape | None]) -> list[dict[str, Any]]:
    """Return a row per batch size: the timing of the tree chosen, and plain decoding's speed.

    Beside them, `ratio` is the tree's speed over plain decoding's, and `step_cost` its time of a step over plain
    decoding's.
    """
    by_key = {(timing.batch, timing.shape): timing for timing in timings}
    rows = []
    for batch, shape in sorted(shapes.items()):
        chosen, plain = by_key[batch, shape], by_key[batch, None]
        speed, plain_speed = chosen.tokens_per_second, plain.tokens_per_second
        cost = chosen.step_ms / plain.step_ms
        ratios = {"plain_tokens_per_second": plain_speed, "ratio": speed / plain_speed, "step_cost": cost}
        rows.append(chosen.to_dict() | ratios)
    return rows
