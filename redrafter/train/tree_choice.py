"""Choose the tree of a trained drafter: the one that writes most on validation texts."""

from collections.abc import Mapping

from redrafter.drafting.drafter_config import MEASURED_NODES
from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.measure.replay import ReplayStats, ValidationTexts
from redrafter.tree.sizes import TreeShape

WIDTHS = (3, 4, 5, 8)  # candidate widths for a trained drafter's default tree
# Trees within this fraction of the best count as equal: 32 texts of 64 tokens do not resolve smaller differences.
TIE = 0.01


def candidates(drafter: TrainableDrafter, draft_len: int) -> list[TreeShape]:
    """Return the trees to compare for a drafter that was trained for `draft_len` steps: up to twice as deep."""
    widths = [width for width in WIDTHS if width <= drafter.config.num_draft_ids]
    deepest = max(2 * draft_len, 2)
    deepest = min(deepest, drafter.config.max_draft_len or deepest)
    pairs = [(width, depth) for width in widths for depth in range(min(2, deepest), deepest + 1)]
    return [TreeShape(beams, depth, min(MEASURED_NODES, 1 + beams * depth)) for beams, depth in pairs]


def best_tree(tokens_per_step: Mapping[TreeShape, tuple[float, float]]) -> TreeShape:
    """Return the tree with the most tokens per step, averaged over greedy and temperature 1.

    Of equally good trees it is the shallowest, since the time of a draft grows with its depth.
    """
    mean = {shape: sum(pair) / 2 for shape, pair in tokens_per_step.items()}
    least = (1 - TIE) * max(mean.values())
    return min((shape for shape in mean if mean[shape] >= least), key=lambda shape: (shape.depth, -mean[shape]))


def choose_tree(
    drafter: TrainableDrafter, texts: ValidationTexts, draft_len: int, seed: int
) -> tuple[dict[str, ReplayStats], str]:
    """Set the search defaults in a drafter's config to the tree with the most tokens per step on validation texts.

    Widths and depths are compared at a fixed number of verified nodes, which determines the cost of the base's step.
    One search per width serves all depths, so the choice costs about one validation per width, plus the generation of
    the texts at temperature 1.

    Args:
        drafter: A drafter that was trained for `draft_len` steps.
        texts: Greedy texts of the base; texts at temperature 1 are generated here from the same prompts.
        draft_len: Number of draft steps that it was trained for.
        seed: Seed of the texts at temperature 1.

    Returns the statistics of the tree on texts of each temperature, greedy ones first, and a line about the choice.
    """
    shapes = candidates(drafter, draft_len)
    # A served drafter is used both ways, so neither alone decides on the tree.
    greedy, sampled = (texts.measure_all(drafter, shapes, written) for written in (texts.texts, texts.sampled(seed)))
    pairs = zip(greedy, sampled, strict=True)
    measured = {shape: (a.tokens_per_step, b.tokens_per_step) for shape, (a, b) in zip(shapes, pairs, strict=True)}
    chosen, config = best_tree(measured), drafter.config
    config.draft_beams, config.draft_len_per_beam = chosen.beams, chosen.depth
    at = {f"{shape.beams}x{shape.depth}": "{:.2f} greedily, {:.2f} at T=1".format(*measured[shape]) for shape in shapes}
    name, trained = f"{chosen.beams}x{chosen.depth}", f"5x{draft_len}"
    other = f"; {trained} {at[trained]}" if trained in at and trained != name else ""
    line = f"tree of {chosen.node_budget} nodes: {name} writes most, tokens per step {at[name]}{other}"
    index = shapes.index(chosen)
    return {"greedy": greedy[index], "temperature 1": sampled[index]}, line
