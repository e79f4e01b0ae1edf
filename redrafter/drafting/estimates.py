"""What the policy of drafting knows: the time of steps, what their drafts promise, and so which trees are worth trying.

The time of a step follows from the tokens of its forward and from what is drafted before it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, log2
from typing import Any

from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.tree.likelihood import LIKELIHOODS
from redrafter.tree.sizes import MAX_BEAMS, TreeShape

Clock = Callable[[], float]

Curve = tuple[tuple[int, float], ...]
"""Times by a number, which rises from point to point; straight between points and after the last two."""

# A step without drafts by its tokens, in such steps of one token, and one whose rows have several tokens each: a bf16
# 8B model on an H200, and the boxed pair on one core, where each row takes time of its own.
ASSUMED_STEPS: Mapping[str, Curve] = {
    "cuda": ((1, 1.0), (26, 1.02), (64, 1.06), (128, 1.15), (208, 1.45), (256, 1.75), (512, 3.1), (1024, 5.9)),
    "cpu": ((1, 1.0), (8, 1.05), (16, 1.12), (32, 1.28), (64, 1.65), (128, 2.5), (256, 4.3)),
}
ASSUMED_TREES: Mapping[str, Curve] = {
    "cuda": ASSUMED_STEPS["cuda"],
    "cpu": ((1, 1.0), (12, 1.06), (32, 1.2), (64, 1.48), (128, 2.0), (256, 3.2)),
}
# What the levels of a search add together at least where a GPU drafts, which reads weights there.
ASSUMED_DRAFT = 0.2
# Of the boxed pair on one core: a search of one level by its rows, and each further level by the beams of all rows.
ASSUMED_SEARCHES: Curve = ((1, 0.12), (8, 0.14), (32, 0.25), (64, 0.4))
ASSUMED_LEVELS: Curve = ((1, 0.04), (8, 0.06), (40, 0.2), (160, 0.6))
# A step of a model whose weights are far larger than a CPU's caches, by its tokens and the bytes of a weight:
# SmolLM2-135M on one core. In float32, products of two and three tokens take longer there than those of four.
LARGE_STEPS: Mapping[int, Curve] = {
    4: ((1, 1.0), (2, 1.4), (4, 1.4), (6, 1.6), (12, 1.8), (26, 2.6), (64, 5.0), (256, 18.0)),
    2: ((1, 1.0), (2, 1.02), (4, 1.18), (6, 1.2), (12, 1.45), (26, 2.2), (64, 4.5), (256, 16.0)),
}
LARGE_BYTES = 2e8  # of such a model
CURVES = ("steps", "trees", "searches", "levels")  # of `StepCosts`

SAMPLES = 4  # steps of a kind that are timed, of which the shortest counts: others were stretched by other work
ENOUGH = 2  # of these, before they count

# Drafts of each likelihood that are taken to be accepted as the drafter's others are, and those, next to what was seen.
PRIOR_OF_EACH, PRIOR_OF_ALL = 4.0, 8.0
PRIOR_ROWS = 8  # rows of steps that what is taken of a drafter, or known from earlier sequences, counts as
VERIFIED_ROWS, VERIFIED_STEPS = 256, 64  # rows of steps, and steps, by which drafts of a likelihood are judged
WINDOW = 32  # rows of steps that count as much as all that was known before them
LEAST_SHARE = 0.1  # of what a step's drafts say of those that may come, in addition to what earlier ones said
FORGOTTEN = 0.7  # part of what is known of drafts that still counts for another batch
UNLIKELY = 0.004  # part of the drafts that is accepted of those that are less likely than all `LIKELIHOODS`
RECALL = 0.01  # by how much levels that a step did not search turn to what those above them promise
QUALITY = 0.65  # of `Promise`, that a drafter is taken to have before any step
# By likelihood, what those between two bounds are about.
TYPICAL = [0.95, *((a * b) ** 0.5 for a, b in pairwise(LIKELIHOODS))]
# Drafts of a row's first level, in addition to the one that is likely: of the boxed pair, sampled, without the best.
OTHERS = (0.0, 0.0, 0.0, 0.0, 0.1, 0.15, 0.4, 0.7, 1.2, 1.0)

WIDTHS = (1, 2, 3, 5)  # of searches that are looked at, in addition to the widest one
DEPTHS = (1, 2, 3, 4, 5, 7)  # likewise, in addition to the deepest one
NODES = (2, 3, 4, 6, 8, 12, 16, 24)  # of each row, in addition to all that are searched
SHARED = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)  # of each row on average, where rows share
# From which on rows share nodes, where a forward computes ragged trees; with fewer, each has nodes enough for what is
# likely, and drafts that are copied from its sequence, which rows that share nodes go without.
SHARING_ROWS = 32
# Qualities of drafters, as `Promise` has them, for each of which the best tree is at hand. On a GPU each kind of step
# is captured when it is first taken, which takes as long as many steps.
QUALITIES = {"cpu": (0.35, 0.5, 0.65, 0.8, 0.92), "cuda": (0.65,)}


@dataclass(frozen=True)
class StepCosts:
    """The time of steps, in any unit.

    Attributes:
        steps: Time of a step without drafts, by its rows.
        trees: Time of a step whose rows have several tokens each, and that searches none of them, by all these tokens.
        searches: Time that a search of one level adds to a step, by its rows.
        levels: Time that each further level adds, by the beams of all rows.
        reading: Time that each token in the cache adds, whatever is drafted.
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
            # More work is never cheaper: what was measured before it took too long, as other programs ran beside it.
            times = [*accumulate((float(time) for _, time in reversed(curve)), min)][::-1]
            object.__setattr__(self, name, tuple(zip(numbers, times, strict=True)))

    @classmethod
    def assumed(cls, device: str, draft: float, forward: float, depth: int, itemsize: int = 2) -> "StepCosts":
        """Return what steps are taken to cost where nothing was measured.

        Args:
            device: Type of the device.
            draft: Bytes of the weights that a draft reads.
            forward: Bytes of the weights that a forward of the target reads.
            depth: Levels of that draft.
            itemsize: Bytes of a weight.
        """
        share = draft / forward
        if device == "cpu":
            large, much = LARGE_STEPS[4 if itemsize >= 4 else 2], min(forward / LARGE_BYTES, 1.0)
            search = tuple((n, share / depth * time) for n, time in large)
            light = ASSUMED_STEPS["cpu"], ASSUMED_TREES["cpu"], ASSUMED_SEARCHES, ASSUMED_LEVELS  # in its caches
            pairs = zip(light, (large, large, search, search), strict=True)
            steps, trees, searches, levels = (_between(small, more, much) for small, more in pairs)
            return cls(steps, trees, searches, levels)
        level: Curve = ((1, max(share, ASSUMED_DRAFT) / depth),)
        return cls(ASSUMED_STEPS["cuda"], ASSUMED_TREES["cuda"], level, level)

    @classmethod
    def from_dict(cls, document: Any) -> "StepCosts":
        """Read what `to_dict` wrote; `ValueError` or `TypeError` for anything else."""
        if not isinstance(document, dict) or set(document) | {"reading"} != {*CURVES, "reading"}:
            raise TypeError(f"costs must be an object of {', '.join(CURVES)} and reading")
        curves = (tuple((int(n), float(time)) for n, time in document[name]) for name in CURVES)
        steps, trees, searches, levels = curves
        return cls(steps, trees, searches, levels, float(document.get("reading", 0.0)))

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as JSON has them, curves as lists of pairs."""
        return {name: [list(point) for point in getattr(self, name)] for name in CURVES} | {"reading": self.reading}

    def of_tree(self, rows: int, beams: int, depth: int, tokens: int) -> float:
        """Return the time of a step of `rows` rows whose trees, and parts of prompts, have so many tokens together.

        Trees without beams are copied, not searched.
        """
        if not depth:
            return time_at(self.steps, tokens)
        # A tree of few tokens is hardly ever cheaper than none.
        verified = max(time_at(self.trees, tokens), time_at(self.steps, rows))
        if not beams:
            return verified
        return verified + time_at(self.searches, rows) + (depth - 1) * time_at(self.levels, rows * beams)

    def of(self, proposer: Proposer, rows: int, more: int = 0) -> float:
        """Return the time of a step of `rows` rows that also reads `more` tokens of prompts."""
        search = proposer.without_text or proposer
        beams = search.beams if isinstance(search, SearchProposer) else 0
        depth = search.depth or proposer.depth
        return self.of_tree(rows, beams, depth, step_tokens(proposer, rows) + more)


def time_at(curve: Curve, number: int) -> float:
    """Return the time at a number: that of the first point before it, on a straight line elsewhere."""
    if number <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    after = min(bisect_right(curve, number, key=lambda point: point[0]), len(curve) - 1)
    (low, before), (high, later) = curve[after - 1], curve[after]
    return before + (later - before) * (number - low) / (high - low)


def _between(first: Curve, second: Curve, share: float) -> Curve:
    """Return the curve that is so far from the first to the second."""
    numbers = sorted({number for number, _ in (*first, *second)})
    return tuple((n, (1 - share) * time_at(first, n) + share * time_at(second, n)) for n in numbers)


class StepTimes:
    """The time of steps by their rows and proposers: by `StepCosts`, corrected by what was measured of each kind.

    A kind of step that was not measured costs as much more than a step without drafts as `StepCosts` has it, times what
    that was wrong by for the kind most like it. Nothing runs only to be measured, as a large model's step may take
    seconds: the first few steps of each kind are timed. After that its time stays as it is, so that what is drafted
    follows from the costs and the tokens alone.

    Attributes:
        plain: The proposer that drafts nothing.
        clock: Gives the time in seconds; None to measure nothing.
    """

    def __init__(
        self,
        assumed: StepCosts,
        plain: Proposer,
        clock: Clock | None = None,
        known: Iterable[tuple[int, Proposer, float]] = (),
    ):
        """Begin with costs that are assumed.

        Args:
            assumed: These costs.
            plain: The proposer that drafts nothing.
            clock: As the attribute.
            known: What was measured before: rows, a proposer, and the time of such a step in steps without drafts.
        """
        self._assumed, self.plain, self.clock = assumed, plain, clock
        self._samples: dict[tuple[int, int], list[float]] = defaultdict(list)  # by rows and id of the proposer
        self._timed: dict[int, Proposer] = {}  # by id
        self._excess: dict[tuple[int, int], tuple[float, float]] = {}  # over a plain step: assumed, and measured
        for rows, proposer, ratio in known:
            self._know(rows, proposer, ratio)

    def wants(self, rows: int, proposer: Proposer, count: int = SAMPLES) -> bool:
        """Return whether fewer than `count` steps of this kind were timed, where any are."""
        return self.clock is not None and len(self._samples[rows, id(proposer)]) < count

    def observe(self, rows: int, proposer: Proposer, seconds: float) -> None:
        """Record the time of a step."""
        self._timed[id(proposer)] = proposer
        self._samples[rows, id(proposer)].append(seconds)
        if self.wants(rows, self.plain, ENOUGH):
            return
        without = min(self._samples[rows, id(self.plain)])
        for key, each in self._timed.items():
            if each is not self.plain and not self.wants(rows, each, ENOUGH):
                self._know(rows, each, min(self._samples[rows, key]) / without if without > 0 else 1.0)

    def _know(self, rows: int, proposer: Proposer, ratio: float) -> None:
        self._timed[id(proposer)] = proposer  # so that no other one has its id
        expected = self._assumed.of(proposer, rows) / self._assumed.of(self.plain, rows)
        self._excess[rows, id(proposer)] = expected - 1, ratio - 1

    def of(self, proposer: Proposer, rows: int, more: int = 0, cached: int = 0) -> float:
        """Return the time of a step of `rows` rows, in the costs' unit.

        It also reads `more` tokens of prompts; `cached` tokens of all rows are in the cache.
        """
        assumed = self._assumed.of(proposer, rows, more) + self._assumed.reading * cached
        if proposer is self.plain or not self._excess:
            return assumed
        alone, plain = self._assumed.of(proposer, rows), self._assumed.of(self.plain, rows)
        excess = alone / plain - 1
        measured = self._excess.get((rows, id(proposer)))
        if measured is None:
            likest = min(self._excess, key=lambda key: (abs(log2(key[0] / rows)), abs(self._excess[key][0] - excess)))
            expected, found = self._excess[likest]
            measured = excess, excess * max(found, 0.0) / max(expected, 1e-3)
        return assumed - alone + plain * (1 + measured[1])


class Promise:
    """Estimates how many drafts of a tree are accepted on average, from what became of earlier ones.

    Attributes:
        levels: Drafts of each level of a row's search by their likelihood, `TYPICAL`.
        rates: The part of the drafts of each likelihood that is accepted.
    """

    def __init__(self, quality: float):
        """Begin with a drafter whose best draft of each level is right with probability `quality`, about."""
        likely = [0.7 * quality**2, 0.3 * quality**2, *(2 * [quality * (1 - quality) / 2]), *(6 * [0.0])]
        first = [n + (1.5 - quality) * other for n, other in zip(likely, OTHERS, strict=True)]
        self.levels, self._ratio = [first], quality
        self._seen = 0.0  # rows of steps
        self._verified, self._accepted = [0.0] * len(TYPICAL), [0.0] * len(TYPICAL)
        self.rates = self._rates()

    def _rates(self) -> list[float]:
        expected = sum(n * likely for n, likely in zip(self._verified, TYPICAL, strict=True))
        trust = (sum(self._accepted) + PRIOR_OF_ALL) / (expected + PRIOR_OF_ALL)
        counts = zip(self._accepted, self._verified, TYPICAL, strict=True)
        return [min((a + PRIOR_OF_EACH * trust * p) / (n + PRIOR_OF_EACH), 1.0) for a, n, p in counts]

    def accepted(self, beams: int, depth: int, drafts: float) -> float:
        """Return how many drafts of a row are accepted, where so many of a search are verified in each on average."""
        self._deepen(depth)
        found = [0.0] * len(TYPICAL)
        for level in self.levels[:depth]:
            for at, count in enumerate(_first(level, beams)):
                found[at] += count
        likely = _first(found, drafts)
        unlikely = min(drafts, beams * depth) - sum(likely)
        return sum(n * rate for n, rate in zip(likely, self.rates, strict=True)) + UNLIKELY * max(unlikely, 0.0)

    def _deepen(self, depth: int) -> None:
        """Take levels that no step has searched yet to go on as those above them do."""
        while len(self.levels) < depth:
            self.levels.append([self._ratio * count for count in self.levels[-1]])

    def observe(self, rows: int, beams: int, outcomes: Sequence[Sequence[int]]) -> None:
        """Take note of a step's `count_outcomes`: of so many rows, at least 1, whose search had so many beams."""
        verified, accepted, *searched = ([b - a for a, b in pairwise((0, *counts))] for counts in outcomes)
        keep = min(max(1 - rows / VERIFIED_ROWS, 0.5), 1 - 1 / VERIFIED_STEPS)
        self._verified = [keep * old + new for old, new in zip(self._verified, verified, strict=True)]
        self._accepted = [keep * old + new for old, new in zip(self._accepted, accepted, strict=True)]
        self.rates = self._rates()
        self._deepen(len(searched))
        share = min(max(rows / (PRIOR_ROWS + self._seen + rows), rows / WINDOW, LEAST_SHARE), 1.0)
        self._seen += rows
        for level, counts in zip(self.levels, searched, strict=False):
            narrow = _first(level, beams)  # what is less likely than all beams of this search stays as it was
            for at, count in enumerate(counts):
                level[at] += share * (count / rows - narrow[at])
        sums = [1.0, *(sum(n * p for n, p in zip(level, TYPICAL, strict=True)) for level in self.levels)]
        last = len(searched)
        if last:
            self._ratio = min(sums[last] / max(sums[last - 1], 1e-9), 1.0)
        for above, below in zip(self.levels[last - 1 :], self.levels[last:], strict=False):
            below[:] = [n + RECALL * (self._ratio * more - n) for n, more in zip(below, above, strict=True)]

    def forget(self, kept: float = FORGOTTEN) -> None:
        """Trust less in what became of drafts so far, since other texts follow, or none were tried for a while."""
        self._seen = 0.0
        self._verified, self._accepted = ([kept * n for n in counts] for counts in (self._verified, self._accepted))
        self.rates = self._rates()


def _first(counts: Sequence[float], most: float) -> list[float]:
    """Return how many drafts of each likelihood are among the `most` likeliest."""
    taken = []
    for count in counts:
        taken.append(min(max(count, 0.0), most))
        most -= taken[-1]
    return taken


def best_trees(
    costs: StepCosts, whole: SearchProposer, rows: int, share: bool, qualities: Iterable[float]
) -> list[TreeShape]:
    """Return the trees with which steps promise most tokens for their time, one for each quality of a drafter.

    Qualities for which no tree beats steps without drafts have none.

    Args:
        costs: What steps take.
        whole: The widest and deepest search that may be made, and the most nodes of a row.
        rows: Rows of the batch.
        share: Whether rows may share nodes.
        qualities: Qualities of drafters, as `Promise` has them.
    """
    looked_at = trees(
        {min(width, whole.beams) for width in (*WIDTHS, whole.beams)},
        {min(each, whole.depth) for each in (*DEPTHS, whole.depth)},
        (*NODES, whole.nodes),
        SHARED if share else (),
        rows,
    )
    usable = [(shape, (shape.shared_nodes or rows * shape.nodes) / rows) for shape in looked_at]
    found: dict[TreeShape, None] = {}
    for quality in qualities:
        promise, best, most = Promise(quality), None, rows / costs.of_tree(rows, 0, 0, rows)
        for shape, nodes in usable:
            if shape.shared_nodes is None and nodes > whole.nodes:
                continue
            gained = promise.accepted(shape.beams, shape.depth, nodes - 1)
            value = rows * (1 + gained) / costs.of_tree(rows, shape.beams, shape.depth, int(rows * nodes))
            if value > most:
                best, most = shape, value
        if best is not None:
            found[best] = None
    return list(found)


def trees(
    widths: Iterable[int], depths: Iterable[int], budgets: Iterable[int], means: Iterable[float] = (), rows: int = 1
) -> Iterator[TreeShape]:
    """Yield trees of these searches: with the best nodes of each row, and with nodes that rows share.

    A tree that has no more nodes than levels is left out, as a shorter search finds the same one; so is a chain without
    its end.

    Args:
        widths: Beams of the searches.
        depths: Levels of the searches.
        budgets: Nodes of each row, in addition to all that a search finds.
        means: Nodes of each row on average, where rows share nodes.
        rows: Rows that share them.
    """
    for beams in sorted({*widths}):
        for depth in sorted({*depths}):
            lattice = 1 + beams * depth
            for mean in means:
                if mean < lattice and rows < (total := int(mean * rows)) <= MAX_BEAMS:
                    yield TreeShape(beams, depth, lattice, total)
            for nodes in sorted({*budgets, lattice}):
                if depth < nodes <= lattice and (beams > 1 or nodes == lattice):
                    yield TreeShape(beams, depth, nodes)
