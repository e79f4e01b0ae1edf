"""Which trees are worth trying at a batch size, by what steps cost there."""

from collections.abc import Iterable, Iterator

from redrafter.checkpoints.merged import TreeShape
from redrafter.drafting.proposer import SearchProposer
from redrafter.drafting.step_choice import Promise
from redrafter.drafting.step_costs import StepCosts
from redrafter.tree.sizes import MAX_BEAMS

WIDTHS = (1, 2, 3, 5)  # of candidate searches, in addition to the widest one
DEPTHS = (1, 2, 3, 4, 5, 7)  # likewise, in addition to the deepest one
NODES = (2, 3, 4, 6, 8, 12, 16, 24)  # of each row, in addition to all that are searched
SHARED = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)  # of each row on average, where rows share
# Qualities of drafters, as `Promise` has them, for each of which the best tree is at hand. On a GPU each kind of step
# is captured when it is first taken, which takes as long as many steps.
QUALITIES = {"cpu": (0.35, 0.5, 0.65, 0.8, 0.92), "cuda": (0.65,)}
# From which on rows share nodes, where a forward computes ragged trees; with fewer, each has nodes enough for what is
# likely, and drafts that are copied from its text, which rows that share nodes go without.
SHARING_ROWS = 32


def best_shapes(
    costs: StepCosts, whole: SearchProposer, rows: int, share: bool, qualities: Iterable[float]
) -> list[TreeShape]:
    """Return the trees with which steps promise most tokens for their time, one for each quality of a drafter.

    Qualities for which no tree beats steps without drafts have none.

    Args:
        costs: Time of steps.
        whole: The widest and deepest search that may be made, and the most nodes of a row.
        rows: Rows of the batch.
        share: Whether rows share nodes.
        qualities: Qualities of drafters, as `Promise` has them.
    """
    found: dict[TreeShape, None] = {}
    for quality in qualities:
        promise, best, most = Promise(quality), None, rows / costs.of_tree(rows, 0, 0, rows)
        for shape, nodes in _shapes(whole, rows, share):
            beams, depth = shape.num_beams or 1, shape.draft_len_per_beam or 1
            gained = promise.accepted(beams, depth, nodes - 1)
            value = rows * (1 + gained) / costs.of_tree(rows, beams, depth, int(rows * nodes))
            # A tree that only breaks even is no better than steps without drafts.
            if value > most:
                best, most = shape, value
        if best is not None:
            found[best] = None
    return list(found)


def _shapes(whole: SearchProposer, rows: int, share: bool) -> Iterator[tuple[TreeShape, float]]:
    """Yield the shapes that are looked at, and the nodes of a row of each, on average."""
    for beams in sorted({min(width, whole.beams) for width in (*WIDTHS, whole.beams)}):
        for depth in sorted({min(each, whole.depth) for each in (*DEPTHS, whole.depth)}):
            lattice = 1 + beams * depth
            if share:
                for mean in SHARED:
                    if mean < lattice and rows < (total := int(mean * rows)) <= MAX_BEAMS:
                        yield TreeShape(beams, depth, lattice, total), total / rows
            for nodes in sorted({*NODES, whole.nodes, lattice}):
                # With less than a level of nodes besides a path to the deepest, a shorter search is the same tree.
                if depth < nodes <= min(lattice, whole.nodes) and (beams > 1 or nodes == lattice):
                    yield TreeShape(beams, depth, nodes), float(nodes)
