"""Which drafts the next step verifies, or none: what promises most tokens for its time.

Whatever is chosen changes no token, as a draft counts only if it is what the target draws itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise

from redrafter.drafting.draft_length import WINDOW
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.drafting.step_costs import StepCosts
from redrafter.drafting.step_times import ENOUGH, StepTimes
from redrafter.tree.likelihood import LIKELIHOODS

# What drafts may lose before they have gained anything, in steps without drafts, and what each such step adds to it.
ALLOWED, ALLOWED_SHARE = 3.0, 0.01
FEWEST = 5  # rows of steps before drafts are judged
# Steps at least between two that try drafts which do not pay, or as many as rows that were seen in vain. Each time they
# are twice as many as the time before, while nothing is gained.
RETRY, LONGEST_RETRY = 8, 128
RECHECK = 4  # steps after which other kinds of steps are looked at again
MARGIN = 1.05  # times the tokens per time of the kind in use, or of steps without drafts, that another must promise
LEAST_SHARE = 0.1  # of what a step's drafts tell of those that may come, beside what earlier ones told
# Drafts of each likelihood that are taken to be accepted as the drafter's others are, and those, beside what was seen.
PRIOR_OF_EACH, PRIOR_OF_ALL = 4.0, 8.0
PRIOR_ROWS = 8  # rows of steps that what is taken of a drafter, or known from earlier texts, counts as
PRIOR_COPIED = 1.0  # drafts of a match that are taken to be accepted
VERIFIED_ROWS, VERIFIED_STEPS = 256, 64  # rows of steps, and steps, by which drafts of a likelihood are judged
# Parts of what is known of drafts that still count for another batch, and where they are tried after a while.
FORGOTTEN, FORGOTTEN_BY_RETRY = 0.7, 0.9
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


def _share(drafting: int) -> float:
    """Return how much a step of so many rows counts beside those before it."""
    return min(max(drafting / WINDOW, LEAST_SHARE), 1.0)


class Allowance:
    """Bounds the time that drafts lose, so that decoding with them is hardly ever slower than without.

    Drafts may lose some steps' time, and a small part of the time of all later steps; what they gain pays that back.
    A few unlucky steps so cost a text none of its drafts, and drafts that go on losing are left out of most steps.
    """

    def __init__(self) -> None:
        """Begin with all that may be lost."""
        self._left, self._waited, self._rows, self._retry, self.pays = ALLOWED, 0, 0, RETRY, True

    def drafts(self, rows: int, loss: float) -> bool:
        """Decide whether the next step drafts; to be called once for each step.

        Args:
            rows: Rows of the step. Those of one step are as much evidence as so many steps of one row.
            loss: What a step that tries drafts in vain loses, in steps without drafts.
        """
        self._waited += 1
        if self._left > 0 and self.pays:
            return True
        if self._waited > max(self._retry, rows) and self._left >= loss:
            self._waited, self._retry = 0, min(2 * self._retry, LONGEST_RETRY)
            return True
        self._left = min(self._left + ALLOWED_SHARE, ALLOWED)
        return False

    def observe(self, rows: int, gained: float, *, pays: bool) -> None:
        """Record a step with drafts of so many rows.

        Args:
            rows: Rows that took drafts.
            gained: What it has gained, in steps without drafts; less than 0 for a loss.
            pays: Whether drafts promise to pay from now on.
        """
        self._left, self._rows = min(self._left + gained, ALLOWED), self._rows + rows
        self.pays = pays or self._rows < FEWEST
        if gained > 0:
            self._retry = RETRY
        if self.pays:
            self._waited = 0


class Experience:
    """What became of earlier drafts, with which an engine's later batches begin.

    Attributes:
        promise: What is known of a search's drafts.
        copied: Drafts that were accepted of a row, and that only the text had, in steps that copy beside a search.
        copied_alone: The same in all steps that copy, which is what copying alone may rely on.
        allowances: Of numbers of rows that are alike.
    """

    def __init__(self, quality: float = QUALITY, copied: float = 0.0):
        """Begin with a drafter of some quality, as `Promise` has it, and with what copies are taken to bring."""
        self.promise, self.copied, self.copied_alone = Promise(quality), copied, copied
        self.allowances: dict[int, Allowance] = defaultdict(Allowance)

    def allowance(self, size: int) -> Allowance:
        """Return that of steps of so many rows."""
        return self.allowances[(size - 1).bit_length()]


class StepChoice:
    """Chooses what each step drafts, by what steps cost and by what became of the drafts of earlier ones.

    Steps that search nothing say nothing of a search's drafts. So while these promise fewer tokens for their time, they
    are tried again as often as `Allowance` permits. Other steps copy drafts from the text where that pays, and draft
    nothing elsewhere. What is decided follows from the costs and from the tokens of earlier steps alone.

    Attributes:
        ratios: By number of rows, the time of a step with drafts in steps without, where it is not from the costs.
        times: What times steps, where their costs are not known beforehand.
    """

    def __init__(
        self,
        costs: StepCosts | StepTimes,
        kinds: Mapping[int, Sequence[Proposer]],
        plain: Proposer,
        ratios: Mapping[int, float],
        experience: Experience | None = None,
        copying: Mapping[int, Proposer] | None = None,
        beside: Mapping[int, Sequence[Proposer]] | None = None,
        reading: float = 0.0,
    ):
        """Begin with what is best by the experience.

        Args:
            costs: What steps take.
            kinds: What may draft for each number of rows that steps are made for; nothing where drafts never pay.
            plain: The proposer that drafts nothing.
            ratios: As the attribute.
            experience: What became of drafts in earlier batches; None for nothing.
            copying: What copies drafts from the text and searches none, by rows; None for nothing.
            beside: The kinds with what they copy from the text, where steps know whether it has something to copy; None
                for nothing.
            reading: Time that each token in the cache adds to a step, whatever it drafts.
        """
        self._costs, self._kinds, self._plain, self.ratios = costs, kinds, plain, ratios
        self.times = costs if isinstance(costs, StepTimes) else None
        self._reading, self._cached = reading, 0  # tokens in the cache, before the step that was chosen last
        self._copying, self._experience = copying or {}, experience or Experience()
        self._knows_matches = beside is not None
        self._beside = {(size, id(each.without_text)): each for size, of in (beside or {}).items() for each in of}
        self._experience.promise.forget()
        self._steps: dict[int, int] = defaultdict(int)
        self._used = {size: max(of, key=partial(self._value, size, size, size, 0)) for size, of in kinds.items() if of}

    @property
    def proposers(self) -> list[Proposer]:
        """All that may draft, whatever the number of rows."""
        return [
            self._plain,
            *self._copying.values(),
            *self._beside.values(),
            *chain.from_iterable(self._kinds.values()),
        ]

    def first(self, size: int) -> Proposer:
        """Return what the next step of so many rows drafts with, if it does not pause."""
        return self._used.get(size, self._plain)

    def choose(self, size: int, rows: int, drafting: int, more: int, cached: int, match: bool = True) -> Proposer:
        """Return the proposer of the next step; to be called once for each step.

        Args:
            size: Rows that the step is made for.
            rows: How many of them there are.
            drafting: How many of those take drafts.
            more: Tokens of prompts that it reads.
            cached: Tokens of all rows that are in the cache.
            match: Whether a text may have something to copy.
        """
        self._cached = cached
        if self.times is not None and self.times.wants(size, self._plain, ENOUGH):
            return self._plain  # all other steps are compared with it
        value, kinds = partial(self._value, size, rows, drafting, more), self._kinds.get(size, ())
        cheapest = min(kinds, key=partial(self._cost, size), default=self._plain)
        usable = cheapest.depth and (match or isinstance(_search(cheapest), SearchProposer))
        allowance = self._experience.allowance(size)
        if not usable or not allowance.drafts(rows, self._cost(size, cheapest) - 1):
            copying = self._copying.get(size, self._plain) if match else self._plain
            return copying if value(copying) >= MARGIN * value(self._plain) else self._plain
        if not allowance.pays:  # the cheapest kind tells as much of what others promise
            self._experience.promise.forget(FORGOTTEN_BY_RETRY)
            return cheapest
        self._steps[size] += 1
        used = self._used[size]
        if self._steps[size] % RECHECK == 0 and len(kinds) > 1:
            best = max(kinds, key=partial(self._value, size, rows, drafting, 0))
            if value(best) > MARGIN * value(used):
                self._used[size] = used = best
        if match and (both := self._beside.get((size, id(used)))) is not None:
            best = max(used, both, self._copying.get(size, used), key=value)
            if best is used:
                self._experience.copied += RECALL * (PRIOR_COPIED - self._experience.copied)
            used = best
        if not more:
            return used
        # Other trees would be steps of other shapes, for as long as prompts are read alone.
        return max(used, self._plain, key=value)

    def observe(
        self,
        size: int,
        rows: int,
        proposer: Proposer,
        drafting: int,
        accepted: int,
        copied: int,
        outcomes: Sequence[Sequence[int]],
    ) -> None:
        """Record a step with drafts.

        Args:
            size: Rows that the step was made for.
            rows: How many of them there were.
            proposer: What drafted.
            drafting: How many rows took drafts, at least 1.
            accepted: Drafts that were accepted.
            copied: Those of them that only the text had.
            outcomes: What became of the drafts by their likelihood, as `count_outcomes` has it.
        """
        known, search = self._experience, _search(proposer)
        share, gained = _share(drafting), accepted
        if isinstance(search, SearchProposer):
            gained = copied
            known.promise.observe(drafting, search.beams, outcomes)
            if search is not proposer:
                known.copied += share * (copied / drafting - known.copied)
        known.copied_alone += share * (gained / drafting - known.copied_alone)
        if not (kinds := self._kinds.get(size)):
            return
        allowance, value = known.allowance(size), partial(self._value, size, rows, drafting, 0)
        # Where steps know of matches, copies are no rival of a search: it is left out in steps that have some to copy.
        copying = self._plain if self._knows_matches else self._copying.get(size, self._plain)
        pays = max(map(value, kinds)) >= MARGIN * max(value(self._plain), value(copying))
        allowance.observe(drafting, (rows + accepted) / rows - self._cost(size, proposer), pays=pays)

    def _cost(self, size: int, proposer: Proposer) -> float:
        """Return the time of a step with a proposer, in steps without drafts."""
        if proposer.depth and (ratio := self.ratios.get(size)) is not None:
            return ratio
        read = self._reading * self._cached
        return (self._costs.of(proposer, size) + read) / (self._costs.of(self._plain, size) + read)

    def _value(self, size: int, rows: int, drafting: int, more: int, proposer: Proposer) -> float:
        """Return the tokens that a step with a proposer promises, per time."""
        known, read = self._experience, self._reading * self._cached
        cost, search = self._costs.of(proposer, size, more) + read, _search(proposer)
        if not isinstance(search, SearchProposer):
            return (rows + drafting * known.copied_alone * bool(proposer.depth)) / cost
        drafts = search.nodes - 1.0
        if search.shared_nodes is not None:
            drafts = (step_tokens(search, size) - size) / max(drafting, 1)
        gained = known.promise.accepted(search.beams, search.depth, drafts)
        if search is not proposer:
            gained += known.copied
        if (ratio := self.ratios.get(size)) is not None:
            cost = ratio * (self._costs.of(self._plain, size, more) + read)
        return (rows + drafting * gained) / cost


def _search(proposer: Proposer) -> Proposer:
    """Return what drafts but for what is copied beside it."""
    return proposer.without_text or proposer
