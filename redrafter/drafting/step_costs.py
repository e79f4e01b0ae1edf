"""The time of a step. It follows from the tokens of its forward and from what is drafted before it."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens

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


@dataclass(frozen=True)
class StepCosts:
    """The time of steps, in any unit.

    Attributes:
        steps: Time of a step without drafts, by its rows.
        trees: Time of a step whose rows have several tokens each, and that searches none of them, by all these tokens.
        searches: Time that a search of one level adds to a step, by its rows.
        levels: Time that each further level adds, by the beams of all rows.
    """

    steps: Curve
    trees: Curve
    searches: Curve
    levels: Curve

    def __post_init__(self) -> None:
        for name, curve in asdict(self).items():
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
            return cls(*(_between(small, more, much) for small, more in pairs))
        level: Curve = ((1, max(share, ASSUMED_DRAFT) / depth),)
        return cls(ASSUMED_STEPS["cuda"], ASSUMED_TREES["cuda"], level, level)

    @classmethod
    def from_dict(cls, document: Any) -> "StepCosts":
        """Read what `to_dict` wrote; `ValueError` or `TypeError` for anything else."""
        if not isinstance(document, dict) or set(document) != {item.name for item in fields(cls)}:
            raise TypeError(f"costs must be an object of {', '.join(item.name for item in fields(cls))}")
        return cls(**{name: tuple((int(n), float(time)) for n, time in curve) for name, curve in document.items()})

    def to_dict(self) -> dict[str, list[list[float]]]:
        """Return the curves as JSON has them: lists of pairs by name."""
        return {name: [list(point) for point in curve] for name, curve in asdict(self).items()}

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
