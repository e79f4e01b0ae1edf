"""The draft tree with the most expected tokens per unit of time, before anything is known of a drafter."""

from collections.abc import Iterator
from functools import lru_cache

from redrafter.drafting.proposer import TRAINED, Likelihoods, Proposer, SearchProposer
from redrafter.drafting.step_times import StepCosts, time_at
from redrafter.tree.sizes import MAX_BEAMS, TreeShape

WIDTHS = (1, 2, 3, 5)  # beams that are compared, in addition to those of the whole search
# Minimum batch size at which rows share nodes, if the forward pass supports ragged trees. In smaller batches each row
# can verify its likely drafts and drafts that are copied from its sequence; rows that share nodes copy none.
SHARING_ROWS = 32


def expected_of(search: Proposer, depth: int, drafts: float, *, sampled: bool) -> float:
    """Return the accepted drafts per row to expect of a search, of which `drafts` of a row are verified."""
    likelihoods = search.likelihoods_of(sampled=sampled) if isinstance(search, SearchProposer) else TRAINED
    return expected_drafts(likelihoods, search.beams, min(depth, search.depth), drafts)


@lru_cache(maxsize=4096)
def expected_drafts(likelihoods: Likelihoods, beams: int, depth: int, drafts: float) -> float:
    """Return the number of accepted drafts per row to expect of a tree.

    Args:
        likelihoods: What the search finds.
        beams: Beams of the search.
        depth: Levels of the search.
        drafts: Mean number of verified drafts per row, which are the likeliest drafts of the search.
    """
    rooms = [float(beams)] * depth  # drafts of each level that are not taken yet
    accepted = 0.0
    for likelihood, count in likelihoods.first_level:
        for level in range(depth):
            taken = min(count * likelihoods.deeper**level, rooms[level], drafts)
            rooms[level] -= taken
            drafts -= taken
            accepted += taken * likelihood
    return accepted


def best_tree(costs: StepCosts, whole: SearchProposer, rows: int, *, share: bool, sampled: bool = False) -> TreeShape:
    """Return the tree with the most expected tokens per unit of time.

    Args:
        costs: Costs of steps.
        whole: The search with the maximum number of beams, levels and nodes per row.
        rows: Rows of the batch.
        share: Whether rows may share nodes.
        sampled: Whether steps sample.
    """
    likelihoods = whole.likelihoods_of(sampled=sampled)

    def speed(shape: TreeShape) -> float:
        tokens = shape.shared_nodes or rows * shape.nodes
        search = shape.depth * time_at(costs.level, rows * shape.beams)
        gained = expected_drafts(likelihoods, shape.beams, shape.depth, tokens / rows - 1)
        return (1 + gained) / (time_at(costs.forward, tokens) + search)

    return max(_trees(whole, rows if share else 0), key=speed)


def _trees(whole: SearchProposer, sharing: int) -> Iterator[TreeShape]:
    """Yield the shapes to compare, the smallest first; `sharing` rows share nodes, 0 for none."""
    for beams in sorted({min(width, whole.beams) for width in (*WIDTHS, whole.beams)}):
        for depth in range(1, whole.depth + 1):
            lattice = 1 + beams * depth  # all nodes of the search
            # With fewer nodes than levels, a shorter search finds the same tree; so does one for a part of a chain.
            fewest = depth + 1 if beams > 1 else lattice
            for nodes in range(fewest, min(lattice, whole.nodes) + 1):
                yield TreeShape(beams, depth, nodes)
            for quarters in range(5, 4 * lattice) if sharing else ():  # nodes of a row, on average
                if (total := sharing * quarters // 4) <= MAX_BEAMS:
                    yield TreeShape(beams, depth, lattice, total)
