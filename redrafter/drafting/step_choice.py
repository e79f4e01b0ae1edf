"""Which drafts the next step verifies, or none: what promises most tokens for its time.

Whatever is chosen changes no token, as a draft counts only if it is what the target draws itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise

from redrafter.drafting.draft_length import FIRST_PAUSE, WINDOW, Pause
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.drafting.step_costs import StepCosts
from redrafter.tree.likelihood import LIKELIHOODS

FEWEST, FEWEST_AFTER_PAUSE = 8, 1  # rows of steps by which drafts are judged at first, and after a pause
LEAST_ROWS = 2  # of a step that has fewer, in that count: four steps are enough
HOPELESS, HOPELESS_PAUSE = 0.85, 64  # of the tokens per time of steps without drafts; steps of a pause after less
RECHECK = 4  # steps after which other kinds of steps are looked at again
MARGIN = 1.05  # times the tokens per time of the kind in use, or of steps without drafts, that another must promise
LEAST_SHARE = 0.1  # of what a step's drafts tell of those that may come, beside what earlier ones told
# Drafts of each likelihood that are taken to be accepted as the drafter's others are, and those, beside what was seen.
PRIOR_OF_EACH, PRIOR_OF_ALL = 2.0, 2.0
VERIFIED_ROWS, VERIFIED_STEPS = 256, 64  # rows of steps, and steps, by which drafts of a likelihood are judged
FORGOTTEN = 0.7  # part of what is known of drafts that still counts after a pause began
UNLIKELY = 0.004  # part of the drafts that is accepted of those that are less likely than all `LIKELIHOODS`
RECALL = 0.01  # by how much levels that a step did not search turn to what those above them promise

QUALITY = 0.65  # of `Promise`, that a drafter is taken to have before any step

# By likelihood, what those between two bounds are about.
TYPICAL = [0.95, *((a * b) ** 0.5 for a, b in pairwise(LIKELIHOODS))]
# Drafts of the first level, of a row, beside the one that is likely: of the boxed pair, sampled, without the best.
OTHERS = (0.0, 0.0, 0.0, 0.0, 0.1, 0.15, 0.4, 0.7, 1.2, 1.0)


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
        share = min(max(rows / (self._seen + rows), rows / WINDOW, LEAST_SHARE), 1.0)
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

    def forget(self) -> None:
        """Trust less in what became of drafts so far, since they are not tried for a while."""
        self._verified, self._accepted = (
            [FORGOTTEN * n for n in counts] for counts in (self._verified, self._accepted)
        )
        self.rates = self._rates()


def _first(counts: Sequence[float], most: float) -> list[float]:
    """Return how many drafts of each likelihood are among the `most` likeliest."""
    taken = []
    for count in counts:
        taken.append(min(max(count, 0.0), most))
        most -= taken[-1]
    return taken


def _share(drafting: int) -> float:
    """Return how much a step of so many rows counts beside those before it."""
    return min(max(drafting / WINDOW, LEAST_SHARE), 1.0)


class StepChoice:
    """Chooses what each step drafts, by what steps cost and by what became of the drafts of earlier ones.

    Steps that search nothing tell nothing of a search's drafts. So these are tried again after pauses, each of which is
    twice as long as the one before it, while they promise fewer tokens for their time. Steps of a pause copy drafts
    from the text where that pays, and draft nothing elsewhere. What is decided follows from the costs and from the
    tokens of earlier steps alone.

    Attributes:
        ratios: By number of rows, the time of a step with drafts in steps without, where it is not from the costs.
    """

    def __init__(
        self,
        costs: StepCosts,
        kinds: Mapping[int, Sequence[Proposer]],
        plain: Proposer,
        ratios: Mapping[int, float],
        quality: float = QUALITY,
        copying: Mapping[int, Proposer] | None = None,
        reading: float = 0.0,
    ):
        """Begin with what is best for a drafter of some quality.

        Args:
            costs: What steps take.
            kinds: What may draft for each number of rows that steps are made for; nothing where drafts never pay.
            plain: The proposer that drafts nothing.
            ratios: As the attribute.
            quality: That of `Promise`, before any step.
            copying: What copies drafts from the text and searches none, by rows; None for nothing.
            reading: Time that each token in the cache adds to a step, whatever it drafts.
        """
        self._costs, self._kinds, self._plain, self.ratios = costs, kinds, plain, ratios
        self._reading, self._cached = reading, 0  # tokens in the cache, before the step that was chosen last
        self._copying = copying or {}
        self._promise = Promise(quality)
        # Drafts that were accepted of a row and step, and that only the text had: of steps that copy beside a search,
        # and of all steps, which is what copying alone may rely on.
        self._copied = self._copied_alone = 0.0
        self._pauses: dict[int, Pause] = {}  # of numbers of rows that are alike
        self._steps: dict[int, int] = defaultdict(int)
        self._used = {size: max(of, key=partial(self._value, size, size, size, 0)) for size, of in kinds.items() if of}

    @property
    def proposers(self) -> list[Proposer]:
        """All that may draft, whatever the number of rows."""
        return [self._plain, *self._copying.values(), *chain.from_iterable(self._kinds.values())]

    def first(self, size: int) -> Proposer:
        """Return what the next step of so many rows drafts with, if it does not pause."""
        return self._used.get(size, self._plain)

    def choose(self, size: int, rows: int, drafting: int, more: int, cached: int) -> Proposer:
        """Return the proposer of the next step; to be called once for each step.

        Args:
            size: Rows that the step is made for.
            rows: How many of them there are.
            drafting: How many of those take drafts.
            more: Tokens of prompts that it reads.
            cached: Tokens of all rows that are in the cache.
        """
        used, self._cached = self.first(size), cached
        if used is self._plain or self._pause(size).skip():
            value = partial(self._value, size, rows, drafting, more)
            copying = self._copying.get(size, self._plain)
            return copying if value(copying) >= MARGIN * value(self._plain) else self._plain
        if self._pause(size).trying:  # the cheapest kind tells as much of what others promise
            return min(self._kinds[size], key=partial(self._costs.of, rows=size))
        self._steps[size] += 1
        if self._steps[size] % RECHECK == 0 and len(self._kinds[size]) > 1:
            value = partial(self._value, size, rows, drafting, 0)
            best = max(self._kinds[size], key=value)
            if value(best) > MARGIN * value(used):
                self._used[size] = used = best
        if not more:
            return used
        # Other trees would be steps of other shapes, for as long as prompts are read alone.
        return max(used, self._plain, key=partial(self._value, size, rows, drafting, more))

    def observe(
        self,
        size: int,
        rows: int,
        proposer: Proposer,
        drafting: int,
        copied: int,
        outcomes: Sequence[Sequence[int]],
    ) -> None:
        """Take note of a step with drafts.

        Args:
            size: Rows that the step was made for.
            rows: How many of them there were.
            proposer: What drafted.
            drafting: How many rows took drafts, at least 1.
            copied: Drafts that were accepted, and that only the text had.
            outcomes: What became of the drafts by their likelihood, as `count_outcomes` has it.
        """
        self._note_copies(drafting, copied)
        search = proposer.without_text or proposer
        if not search.depth:
            return
        assert isinstance(search, SearchProposer)
        self._promise.observe(drafting, search.beams, outcomes)
        if search is not proposer:
            self._copied += _share(drafting) * (copied / drafting - self._copied)
        if self._kinds[size]:
            value = partial(self._value, size, rows, drafting, 0)
            best = max(map(value, self._kinds[size]))
            without = max(map(value, (self._plain, self._copying.get(size, self._plain))))
            at_least = HOPELESS_PAUSE if best < HOPELESS * without else FIRST_PAUSE
            rows_judged = max(drafting, LEAST_ROWS)
            if self._pause(size).judge(rows_judged, pays=best >= MARGIN * without, at_least=at_least):
                self._promise.forget()

    def note_no_match(self, drafting: int) -> None:
        """Take note that a step of so many rows, at least 1, copies and drafts nothing, as no text has a match."""
        self._note_copies(drafting, 0)

    def _note_copies(self, drafting: int, copied: int) -> None:
        self._copied_alone += _share(drafting) * (copied / drafting - self._copied_alone)

    def _pause(self, size: int) -> Pause:
        return self._pauses.setdefault((size - 1).bit_length(), Pause(FEWEST, FEWEST_AFTER_PAUSE))

    def _value(self, size: int, rows: int, drafting: int, more: int, proposer: Proposer) -> float:
        """Return the tokens that a step with a proposer promises, per time."""
        read = self._reading * self._cached
        cost = self._costs.of(proposer, size, more) + read
        if not proposer.depth:
            return rows / cost
        search = proposer.without_text or proposer
        if not search.depth:
            return (rows + drafting * self._copied_alone) / cost
        assert isinstance(search, SearchProposer)
        drafts = search.nodes - 1.0
        if search.shared_nodes is not None:
            drafts = (step_tokens(search, size) - size) / max(drafting, 1)
        gained = self._promise.accepted(search.beams, search.depth, drafts)
        if search is not proposer:
            gained += self._copied
        if (ratio := self.ratios.get(size)) is not None:
            cost = ratio * (self._costs.of(self._plain, size, more) + read)
        return (rows + drafting * gained) / cost
