"""Costs of steps, estimates of draft acceptance, and the draft trees that are best by both.

The time of a step depends on the number of tokens of its forward pass and on the search that precedes the forward pass.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.tree.likelihood import LIKELIHOODS
from redrafter.tree.sizes import MAX_BEAMS, TreeShape

Curve = tuple[tuple[int, float], ...]
"""Pairs of a number and a time, in ascending order of the number, that define a piecewise linear function."""

# The time of an undrafted step by its tokens, and of a step whose rows have several tokens each, relative to an
# undrafted step of one token. Measured with a bf16 8B model on an H200, and with the boxed pair on one CPU core, where
# each row adds time.
ASSUMED_STEPS: Mapping[str, Curve] = {
    "cuda": ((1, 1.0), (26, 1.02), (64, 1.06), (128, 1.15), (208, 1.45), (256, 1.75), (512, 3.1), (1024, 5.9)),
    "cpu": ((1, 1.0), (8, 1.05), (16, 1.12), (32, 1.28), (64, 1.65), (128, 2.5), (256, 4.3)),
}
ASSUMED_TREES: Mapping[str, Curve] = {
    "cuda": ASSUMED_STEPS["cuda"],
    "cpu": ((1, 1.0), (12, 1.06), (32, 1.2), (64, 1.48), (128, 2.0), (256, 3.2)),
}
# Minimum time that a whole search adds on a GPU, where the search reads the drafter's weights.
ASSUMED_DRAFT = 0.2
# The time of a search of one level by its rows, and of each further level by the beams of all rows. Measured with the
# boxed pair on one CPU core.
ASSUMED_SEARCHES: Curve = ((1, 0.12), (8, 0.14), (32, 0.25), (64, 0.4))
ASSUMED_LEVELS: Curve = ((1, 0.04), (8, 0.06), (40, 0.2), (160, 0.6))
# The time of a step by its tokens, for models whose weights are much larger than a CPU's caches, by the bytes of a
# weight. Measured with SmolLM2-135M on one CPU core. In float32, matrix products of two and three tokens take longer
# than matrix products of four.
LARGE_STEPS: Mapping[int, Curve] = {
    4: ((1, 1.0), (2, 1.4), (4, 1.4), (6, 1.6), (12, 1.8), (26, 2.6), (64, 5.0), (256, 18.0)),
    2: ((1, 1.0), (2, 1.02), (4, 1.18), (6, 1.2), (12, 1.45), (26, 2.2), (64, 4.5), (256, 16.0)),
}
LARGE_BYTES = 2e8  # bytes of the weights of such a model
CURVES = ("steps", "trees", "searches", "levels")  # fields of `StepCosts` that are curves

# Weights of the priors of an acceptance rate, in drafts: of the prior for a single likelihood class, and of the prior
# for the ratio of accepted drafts to the drafter's likelihood over all classes.
PRIOR_OF_EACH, PRIOR_OF_ALL = 4.0, 8.0
PRIOR_ROWS = 8  # weight of the initial counts of searched drafts, and of counts from earlier batches, in drafted rows
VERIFIED_ROWS, VERIFIED_STEPS = 256, 64  # window of the acceptance rates, in drafted rows and in steps
WINDOW = 32  # window of all other running means, in drafted rows
LEAST_SHARE = 0.1  # minimum weight of one step in these running means
FORGOTTEN = 0.7  # factor that a new batch applies to the weight of earlier acceptance counts
UNLIKELY = 0.004  # acceptance rate of drafts that are less likely than all `LIKELIHOODS`
RECALL = 0.01  # rate per step at which an estimate without new evidence returns to its prior
QUALITY = 0.65  # assumed quality of a drafter before any step; see `AcceptanceEstimator`
# A typical likelihood of each likelihood class: the geometric mean of the bounds of the class.
TYPICAL = [0.95, *((a * b) ** 0.5 for a, b in pairwise(LIKELIHOODS))]
# Initial number of alternative drafts of a row's first level by likelihood class, excluding the best draft. Measured
# with the boxed pair while sampling. They are scaled by `OTHERS_SCALE` minus the quality of the drafter.
OTHERS = (0.0, 0.0, 0.0, 0.0, 0.1, 0.15, 0.4, 0.7, 1.2, 1.0)
OTHERS_SCALE = 1.5

# The searches that `best_trees` compares, in addition to the widest and the deepest one.
WIDTHS = (1, 2, 3, 5)  # beams
DEPTHS = (1, 2, 3, 4, 5, 7)  # levels
NODES = (2, 3, 4, 6, 8, 12, 16, 24)  # nodes per row, in addition to all nodes of the search
SHARED = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)  # mean nodes per row, for rows that share nodes
# Minimum batch size at which rows share nodes, if the forward pass supports ragged trees. In smaller batches each row
# can verify its likely drafts and drafts that are copied from its sequence; rows that share nodes copy none.
SHARING_ROWS = 32
# Drafter qualities, as defined by `AcceptanceEstimator`, for which a policy has the best tree as a candidate. A GPU
# captures each kind of step at its first use, which takes as long as many steps, so it has one: with three, the first
# call of 32 rows on an H100 waited 3.3 ms a step for captures.
QUALITIES = {"cpu": (0.35, 0.5, 0.65, 0.8, 0.92), "cuda": (QUALITY,)}


@dataclass(frozen=True)
class StepCosts:
    """Models the time of steps, in an arbitrary unit.

    Attributes:
        steps: Time of an undrafted step, by its rows.
        trees: Time of a step whose rows have several tokens each, excluding the search, by the tokens of all rows.
        searches: Time that a search of one level adds to a step, by the rows of the step.
        levels: Time that each further level of a search adds, by the beams of all rows.
        reading: Time that each token in the KV cache adds to any step.
    """

    steps: Curve
    trees: Curve
    searches: Curve
    levels: Curve
    reading: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.reading < inf:
            raise ValueError(f"reading must be a time, got {self.reading!r}")
        for name in CURVES:
            curve: Curve = getattr(self, name)
            numbers = [number for number, _ in curve]
            if not curve or numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)) or not curve[0][1] >= 0:
                raise ValueError(f"{name} must be times by rising numbers, got {curve!r}")
            # More work never takes less time. Where a measured time falls, the earlier times are too long, because
            # other programs ran at the same time.
            times = [*accumulate((float(time) for _, time in reversed(curve)), min)][::-1]
            object.__setattr__(self, name, tuple(zip(numbers, times, strict=True)))

    @classmethod
    def assumed(cls, device: str, draft: float, forward: float, depth: int, itemsize: int = 2) -> "StepCosts":
        """Return the costs to assume if no step was measured.

        Args:
            device: Type of the device.
            draft: Bytes of the weights that a search of `depth` levels reads.
            forward: Bytes of the weights that a forward pass of the target reads.
            depth: Levels of the search.
            itemsize: Bytes of a weight.
        """
        share = draft / forward
        if device == "cpu":
            large, much = LARGE_STEPS[4 if itemsize >= 4 else 2], min(forward / LARGE_BYTES, 1.0)
            search = tuple((n, share / depth * time) for n, time in large)
            light = (
                ASSUMED_STEPS["cpu"],
                ASSUMED_TREES["cpu"],
                ASSUMED_SEARCHES,
                ASSUMED_LEVELS,
            )  # weights in the caches
            pairs = zip(light, (large, large, search, search), strict=True)
            steps, trees, searches, levels = (_between(small, more, much) for small, more in pairs)
            return cls(steps, trees, searches, levels)
        level: Curve = ((1, max(share, ASSUMED_DRAFT) / depth),)
        return cls(ASSUMED_STEPS["cuda"], ASSUMED_TREES["cuda"], level, level)

    def of_tree(self, rows: int, beams: int, depth: int, tokens: int) -> float:
        """Return the time of a step.

        Args:
            rows: Rows of the step.
            beams: Beams of the search; 0 for trees that are copied without a search.
            depth: Levels of the trees; 0 for an undrafted step.
            tokens: Tokens of the forward pass: the nodes of all trees plus prefilled prompt tokens.
        """
        if not depth:
            return time_at(self.steps, tokens)
        # A tree of few tokens is rarely cheaper than an undrafted step.
        verified = max(time_at(self.trees, tokens), time_at(self.steps, rows))
        if not beams:
            return verified
        return verified + time_at(self.searches, rows) + (depth - 1) * time_at(self.levels, rows * beams)

    def time_of(self, proposer: Proposer, rows: int, more: int = 0) -> float:
        """Return the time of a step of `rows` rows that also prefills `more` prompt tokens."""
        search = proposer.without_text or proposer
        beams = search.beams if isinstance(search, SearchProposer | DraftModelProposer) else 0
        depth = search.depth or proposer.depth
        return self.of_tree(rows, beams, depth, step_tokens(proposer, rows) + more)


def time_at(curve: Curve, number: int) -> float:
    """Return the time at a number: constant before the first point, linear between points and after the last one."""
    if number <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    after = min(bisect_right(curve, number, key=lambda point: point[0]), len(curve) - 1)
    (low, before), (high, later) = curve[after - 1], curve[after]
    return before + (later - before) * (number - low) / (high - low)


def _between(first: Curve, second: Curve, share: float) -> Curve:
    """Return the linear interpolation between two curves: the first for `share` 0, the second for 1."""
    numbers = sorted({number for number, _ in (*first, *second)})
    return tuple((n, (1 - share) * time_at(first, n) + share * time_at(second, n)) for n in numbers)


class AcceptanceEstimator:
    """Estimates the mean number of accepted drafts of a tree from the outcomes of earlier trees.

    Drafts are counted in likelihood classes, which are the intervals between successive `LIKELIHOODS` of the drafter's
    probability for the path to the draft. The estimator tracks the number of drafts per class in each level of a
    search, and the acceptance rate of each class. One kind of tree therefore gives evidence about all others.

    The quality of a drafter is the approximate probability that its best draft of a level is correct.

    Attributes:
        levels: Mean number of drafts of a row's search in each class, by level.
        rates: Acceptance rate of each class.
    """

    def __init__(self, quality: float):
        """Create the estimator with the assumed distribution of a drafter of the given quality."""
        # The share quality**2 of the best drafts is in the two likeliest classes, quality * (1 - quality) in the next
        # two.
        likely, unsure = quality**2, quality * (1 - quality)
        best = [0.7 * likely, 0.3 * likely, unsure / 2, unsure / 2, *(6 * [0.0])]
        self.levels = [[n + (OTHERS_SCALE - quality) * other for n, other in zip(best, OTHERS, strict=True)]]
        self._ratio = quality  # correct drafts of a level, relative to the level above
        self._seen = 0.0  # drafted rows since the last `forget`
        self._verified = [0.0] * len(TYPICAL)  # decayed counts by class
        self._accepted = [0.0] * len(TYPICAL)
        self.rates = self._rates()

    def _rates(self) -> list[float]:
        """Return the acceptance rate of each class, regularized by the typical likelihood of the class."""
        expected = sum(n * likely for n, likely in zip(self._verified, TYPICAL, strict=True))
        trust = (sum(self._accepted) + PRIOR_OF_ALL) / (expected + PRIOR_OF_ALL)
        counts = zip(self._accepted, self._verified, TYPICAL, strict=True)
        return [min((a + PRIOR_OF_EACH * trust * p) / (n + PRIOR_OF_EACH), 1.0) for a, n, p in counts]

    def accepted(self, beams: int, depth: int, drafts: float) -> float:
        """Return the expected number of accepted drafts per row.

        Args:
            beams: Beams of the search.
            depth: Levels of the search.
            drafts: Mean number of verified drafts per row, which are the likeliest drafts of the search.
        """
        self._deepen(depth)
        found = [0.0] * len(TYPICAL)
        for level in self.levels[:depth]:
            for at, count in enumerate(_first(level, beams)):
                found[at] += count
        likely = _first(found, drafts)
        unlikely = min(drafts, beams * depth) - sum(likely)
        return sum(n * rate for n, rate in zip(likely, self.rates, strict=True)) + UNLIKELY * max(unlikely, 0.0)

    def _deepen(self, depth: int) -> None:
        """Extrapolate levels that no step has searched yet from the level above."""
        while len(self.levels) < depth:
            self.levels.append([self._ratio * count for count in self.levels[-1]])

    def observe(self, rows: int, beams: int, outcomes: Sequence[Sequence[int]]) -> None:
        """Update the estimates with the outcome of a step.

        Args:
            rows: Drafted rows of the step, at least 1.
            beams: Beams of the search.
            outcomes: Output of `count_outcomes`, summed over the rows.
        """
        # The counts are cumulative over likelihoods: their differences are the counts of the classes.
        verified, accepted, *searched = ([b - a for a, b in pairwise((0, *counts))] for counts in outcomes)
        keep = min(max(1 - rows / VERIFIED_ROWS, 0.5), 1 - 1 / VERIFIED_STEPS)
        self._verified = [keep * old + new for old, new in zip(self._verified, verified, strict=True)]
        self._accepted = [keep * old + new for old, new in zip(self._accepted, accepted, strict=True)]
        self.rates = self._rates()
        self._deepen(len(searched))
        share = min(max(rows / (PRIOR_ROWS + self._seen + rows), rows / WINDOW, LEAST_SHARE), 1.0)
        self._seen += rows
        for level, counts in zip(self.levels, searched, strict=False):
            narrow = _first(level, beams)  # a narrow search gives no evidence about drafts beyond its beams
            for at, count in enumerate(counts):
                level[at] += share * (count / rows - narrow[at])
        sums = [1.0, *(sum(n * p for n, p in zip(level, TYPICAL, strict=True)) for level in self.levels)]
        last = len(searched)
        if last:
            self._ratio = min(sums[last] / max(sums[last - 1], 1e-9), 1.0)
        for above, below in zip(self.levels[last - 1 :], self.levels[last:], strict=False):
            below[:] = [n + RECALL * (self._ratio * more - n) for n, more in zip(below, above, strict=True)]

    def forget(self, kept: float = FORGOTTEN) -> None:
        """Reduce the weight of earlier outcomes, for other sequences or after a pause of drafting.

        Args:
            kept: Factor of the weight of earlier acceptance counts.
        """
        self._seen = 0.0
        self._verified, self._accepted = ([kept * n for n in counts] for counts in (self._verified, self._accepted))
        self.rates = self._rates()


def _first(counts: Sequence[float], most: float) -> list[float]:
    """Return the counts of each likelihood class among the `most` likeliest drafts."""
    taken = []
    for count in counts:
        taken.append(min(max(count, 0.0), most))
        most -= taken[-1]
    return taken


def best_trees(
    costs: StepCosts, whole: SearchProposer, rows: int, share: bool, qualities: Iterable[float]
) -> list[TreeShape]:
    """Return the trees with the most expected tokens per unit of time, without duplicates.

    There is one tree for each drafter quality, except for qualities at which no tree is faster than undrafted decoding.

    Args:
        costs: Costs of steps.
        whole: The search with the maximum number of beams, levels and nodes per row.
        rows: Rows of the batch.
        share: Whether rows may share nodes.
        qualities: Drafter qualities, as defined by `AcceptanceEstimator`.
    """
    compared = trees(
        {min(width, whole.beams) for width in (*WIDTHS, whole.beams)},
        {min(each, whole.depth) for each in (*DEPTHS, whole.depth)},
        (*NODES, whole.nodes),
        SHARED if share else (),
        rows,
    )
    usable = [(shape, (shape.shared_nodes or rows * shape.nodes) / rows) for shape in compared]
    found: dict[TreeShape, None] = {}
    for quality in qualities:
        estimator, best, most = AcceptanceEstimator(quality), None, rows / costs.of_tree(rows, 0, 0, rows)
        for shape, nodes in usable:
            if shape.shared_nodes is None and nodes > whole.nodes:
                continue
            gained = estimator.accepted(shape.beams, shape.depth, nodes - 1)
            value = rows * (1 + gained) / costs.of_tree(rows, shape.beams, shape.depth, int(rows * nodes))
            if value > most:
                best, most = shape, value
        if best is not None:
            found[best] = None
    return list(found)


def trees(
    widths: Iterable[int], depths: Iterable[int], budgets: Iterable[int], means: Iterable[float] = (), rows: int = 1
) -> Iterator[TreeShape]:
    """Yield the shapes of candidate trees, both with a fixed number of nodes per row and with nodes that rows share.

    Trees without more nodes than levels are omitted, since a shorter search finds the same tree. Truncated chains are
    omitted for the same reason.

    Args:
        widths: Numbers of beams.
        depths: Numbers of levels.
        budgets: Numbers of nodes per row, in addition to all nodes of each search.
        means: Mean numbers of nodes per row, for rows that share nodes.
        rows: Number of rows that share nodes.
    """
    for beams in sorted({*widths}):
        for depth in sorted({*depths}):
            lattice = 1 + beams * depth  # all nodes of the search
            for mean in means:
                if mean < lattice and rows < (total := int(mean * rows)) <= MAX_BEAMS:
                    yield TreeShape(beams, depth, lattice, total)
            for nodes in sorted({*budgets, lattice}):
                if depth < nodes <= lattice and (beams > 1 or nodes == lattice):
                    yield TreeShape(beams, depth, nodes)
