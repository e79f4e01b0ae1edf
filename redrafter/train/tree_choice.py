"""Choose the tree that a trained drafter is searched with: the one whose steps write most on the validation texts.

The widths and depths are compared at one number of verified nodes, for that is what a step of the base costs. One
search of each width serves all depths (see `redrafter.train.evaluate.replay`), so the choice costs about as much as a
validation for each width, and the texts that the base writes at temperature 1.
"""

from collections.abc import Mapping

from redrafter.drafting.drafter_config import MEASURED_NODES
from redrafter.drafting.drafter_types import Drafter
from redrafter.train.evaluate.replay import ReplayStats, Shape, ValidationTexts

WIDTHS = (3, 4, 5, 8)
# A tree that writes less than the best by no more than this share is as good: 32 texts of 64 tokens tell no better.
TIE = 0.01


def candidates(drafter: Drafter, draft_len: int) -> list[Shape]:
    """Return the trees to compare for a drafter that was trained for `draft_len` steps: up to twice as deep."""
    vocabulary = drafter.config.draft_vocab_size or drafter.config.vocab_size
    widths = [width for width in WIDTHS if width <= vocabulary]
    pairs = [(width, depth) for width in widths for depth in range(2, max(2 * draft_len, 2) + 1)]
    return [Shape(beams, depth, min(MEASURED_NODES, 1 + beams * depth)) for beams, depth in pairs]


def best_tree(tokens_per_step: Mapping[Shape, tuple[float, float]]) -> Shape:
    """Return the tree with the most tokens per step, greedily and at temperature 1 averaged.

    Of trees that are as good, it is the shallowest, since a draft's time grows with its depth, and of those the best.
    """
    mean = {shape: sum(pair) / 2 for shape, pair in tokens_per_step.items()}
    least = (1 - TIE) * max(mean.values())
    return min((shape for shape in mean if mean[shape] >= least), key=lambda shape: (shape.depth, -mean[shape]))


def choose_tree(drafter: Drafter, texts: ValidationTexts, draft_len: int, seed: int) -> tuple[ReplayStats, str]:
    """Set the search defaults in a drafter's config to the tree that writes most.

    Args:
        drafter: A drafter that was trained for `draft_len` steps.
        texts: What the base wrote greedily; it also continues the same prompts at temperature 1 here.
        draft_len: The steps that it was trained for.
        seed: Seed of the texts at temperature 1.

    Returns what the tree writes greedily, and a line about the choice.
    """
    shapes = candidates(drafter, draft_len)
    greedy, sampled = (texts.measure_all(drafter, shapes, written) for written in (texts.texts, texts.sampled(seed)))
    pairs = zip(greedy, sampled, strict=True)
    measured = {shape: (a.tokens_per_step, b.tokens_per_step) for shape, (a, b) in zip(shapes, pairs, strict=True)}
    chosen, config = best_tree(measured), drafter.config
    config.draft_beams, config.draft_len_per_beam = chosen.beams, chosen.depth
    at = {f"{shape.beams}x{shape.depth}": "{:.2f} greedily, {:.2f} at T=1".format(*measured[shape]) for shape in shapes}
    name, trained = f"{chosen.beams}x{chosen.depth}", f"5x{draft_len}"
    other = f"; {trained} {at[trained]}" if trained in at and trained != name else ""
    line = f"tree of {chosen.nodes} nodes: {name} writes most, tokens per step {at[name]}{other}"
    return greedy[shapes.index(chosen)], line
