"""The policy: which drafts the next step verifies, or none.

A policy knows the trees that steps of each number of rows may have. It chooses one by what steps cost and by what
became of earlier drafts, as `estimates.py` has both, and is given what became of the drafts of each step. Whatever it
chooses changes no token, as a draft counts only if it is what the target draws itself.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from redrafter.drafting.estimates import (
    ENOUGH,
    LEAST_SHARE,
    QUALITY,
    RECALL,
    WINDOW,
    AcceptanceEstimator,
    StepCosts,
    StepTimes,
)
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens

# What drafts may lose before they have gained anything, in steps without drafts, and what each such step adds to it.
ALLOWED, ALLOWED_SHARE = 3.0, 0.01
FEWEST = 5  # rows of steps before drafts are judged
# Steps at least between two that try drafts which do not pay, or as many as rows that were seen in vain. Each time they
# are twice as many as the time before, while nothing is gained.
RETRY, LONGEST_RETRY = 8, 128
RECHECK = 4  # steps after which other kinds of steps are looked at again
MARGIN = 1.05  # times the tokens per time of the kind in use, or of steps without drafts, that another must promise
FORGOTTEN_BY_RETRY = 0.9  # part of what is known of drafts that still counts where they are tried after a while
PRIOR_COPIED = 1.0  # drafts of a match that are taken to be accepted
COPIES_COST = 0.1  # time of a step that copies are added to, in addition to that of the step alone

# Tokens of all rows, up to which drafts are added that are copied from texts. The matrix products of a bf16 8B model on
# an H200 take, for 1/26/64/128/208/256 tokens, 3.97/4.04/4.24/4.64/6.0/7.3 ms: memory sets the time up to about 128.
COPYING_TOKENS = {"cuda": 128, "cpu": 64}
COPYING_COST = 1.25  # most time of such a step, in steps of one token, where it is measured: FP8 weights end sooner
MOST_COPIED, LEAST_COPIED = 16, 4  # drafts that are copied from a sequence in one step

DECAY_PER_STEP = 0.9  # weight of older drafts of a row after each step, where their length is chosen
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 4.0  # drafts that a new row counts as accepted and as judged


def text_nodes(size: int, nodes: int, device: str = "cuda", measured: StepCosts | None = None) -> int:
    """Return how many drafts to copy from each row's text in addition to a tree; 0 where they would cost time.

    Args:
        size: Rows that the step is made for.
        nodes: Nodes of each row's tree.
        device: Type of the device.
        measured: What steps take, where that was measured. It counts on a GPU alone, as a CPU's steps search and copy
            only where a text has a match.
    """
    tokens = COPYING_TOKENS[device]
    if measured is not None and device != "cpu":
        most = COPYING_COST * measured.steps[0][1]
        tokens = max(number for number, time in measured.steps if number <= tokens and time <= most)
    count = min(MOST_COPIED, tokens // size - nodes)
    return count if count >= LEAST_COPIED else 0


class StepRows(NamedTuple):
    """The rows of the next step.

    Attributes:
        size: Rows that the step is made for.
        rows: How many of them there are.
        drafting: How many of those take drafts.
        prompt_tokens: Tokens of prompts that it reads.
        cached: Tokens of all rows that are in the cache.
        match: Whether a text has something to copy; None where that is not known.
        indices: Number of each row's sequence among those of its call.
    """

    size: int
    rows: int
    drafting: int
    prompt_tokens: int = 0
    cached: int = 0
    match: bool | None = None
    indices: Sequence[int] = ()


class DraftedStep(NamedTuple):
    """A step with drafts, and what became of these.

    Attributes:
        size: Rows that the step was made for.
        rows: How many of them there were.
        proposer: What drafted.
        accepted: Drafts that were accepted of each row that took some, of which there is at least 1.
        copied: Those of them all that only the text had.
        outcomes: What became of the drafts by their likelihood, as `count_outcomes` has it.
        levels: Levels of drafts.
        indices: Number of the sequence of each row in `accepted` among those of its call.
    """

    size: int
    rows: int
    proposer: Proposer
    accepted: Sequence[int]
    copied: int = 0
    outcomes: Sequence[Sequence[int]] = ()
    levels: int = 0
    indices: Sequence[int] = ()


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
        """Create a history with an assumed drafter quality and assumed accepted copies per row."""
        self.promise, self.copied, self.copied_alone = AcceptanceEstimator(quality), copied, copied
        self.allowances: dict[int, Allowance] = defaultdict(Allowance)

    def allowance(self, size: int) -> Allowance:
        """Return that of steps of so many rows."""
        return self.allowances[(size - 1).bit_length()]


class DraftPolicy:
    """Decides what each step drafts: here one tree for each number of rows.

    Copies that are added to a tree are left out where steps know that no text has a match, and while they do not pay.

    Attributes:
        times: What times steps, where the policy has to know their costs; else None.
    """

    times: StepTimes | None = None

    def __init__(self, trees: Mapping[int, Proposer]):
        """Begin with what drafts for each number of rows that steps are made for."""
        self._trees = dict(trees)
        self._allowance, self._copied = Allowance(), 2 * COPIES_COST

    @property
    def proposers(self) -> list[Proposer]:
        """All that may draft, whatever the number of rows."""
        return list(self._trees.values())

    def first(self, size: int) -> Proposer:
        """Return what the next step of so many rows drafts with, if it does not pause."""
        return self._trees[size]

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step; to be called once for each step."""
        tree = self._trees[step.size]
        if tree.without_text is None or step.match is None:
            return tree  # a GPU would have to capture another step, which costs more than nodes that are copied in vain
        return tree if step.match and self._allowance.drafts(step.drafting, COPIES_COST) else tree.without_text

    def record(self, step: DraftedStep) -> None:
        """Record what became of a step's drafts."""
        if step.proposer.without_text is not None:
            gained, rows = step.copied / len(step.accepted), len(step.accepted)
            self._copied += _share(rows) * (gained - self._copied)
            self._allowance.observe(rows, gained - COPIES_COST, pays=self._copied >= COPIES_COST)


class DraftLengthPolicy(DraftPolicy):
    """Chooses the length of a second model's drafts that is expected to give most tokens per unit of time.

    A row whose drafts are each accepted with probability a gains 1 + a + ... + a^K tokens in a step that is K drafts
    deep and takes time 1 + K * cost. Each row has its own a, estimated from its own drafts, with more weight on the
    latest. The rows of a batch share a step, so their tokens are added up. Only drafts that have been judged count, so
    samples are not biased.
    """

    def __init__(self, lengths: Mapping[int, Proposer], sizes: Sequence[int], cost: Callable[[int], float]):
        """Begin with the prior for every row.

        Args:
            lengths: The proposers to choose from, by draft length.
            sizes: Numbers of rows that steps are made for.
            cost: Gives the time that one more draft adds to a step of so many rows, as a part of the time of a step
                without drafts.
        """
        super().__init__(dict.fromkeys(sizes, lengths[max(lengths)]))
        self._lengths, self._cost = lengths, cost
        self._accepted: dict[int, float] = defaultdict(lambda: PRIOR_ACCEPTED)  # by the index of a sequence
        self._judged: dict[int, float] = defaultdict(lambda: PRIOR_JUDGED)

    @property
    def proposers(self) -> list[Proposer]:
        """All that may draft, whatever the number of rows."""
        return list(self._lengths.values())

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the length that promises most; see `DraftPolicy.choose`."""
        chances = [self._accepted[index] / self._judged[index] for index in step.indices]

        def tokens_per_time(length: int) -> float:
            tokens = sum(sum(chance**depth for depth in range(length + 1)) for chance in chances)
            return tokens / (1 + length * self._cost(len(chances)))

        return self._lengths[max(self._lengths, key=tokens_per_time)]

    def record(self, step: DraftedStep) -> None:
        """Update the estimate of each row that took drafts.

        A step judges a row's accepted drafts and the first rejected one; nothing is known of the drafts after it.
        """
        for index, accepted in zip(step.indices, step.accepted, strict=True):
            self._accepted[index] = DECAY_PER_STEP * self._accepted[index] + accepted
            self._judged[index] = DECAY_PER_STEP * self._judged[index] + min(accepted + 1, step.levels)


class CostPolicy(DraftPolicy):
    """Chooses what each step drafts by what steps cost and by what became of the drafts of earlier ones.

    Steps that search nothing say nothing of a search's drafts. So while these promise fewer tokens for their time, they
    are tried again as often as `Allowance` permits. Other steps copy drafts from the text where that pays, and draft
    nothing elsewhere. What is decided follows from the costs and from the tokens of earlier steps alone.
    """

    def __init__(
        self,
        times: StepTimes,
        kinds: Mapping[int, Sequence[Proposer]],
        experience: Experience | None = None,
        copying: Mapping[int, Proposer] | None = None,
        *,
        knows_matches: bool = False,
    ):
        """Begin with what is best by the experience.

        Args:
            times: What steps take.
            kinds: What may draft for each number of rows that steps are made for; nothing where drafts never pay.
            experience: What became of drafts in earlier batches; None for nothing.
            copying: What copies drafts from the text and searches none, by rows; None for nothing.
            knows_matches: Whether steps know if a text has something to copy. Only those that have copy then.
        """
        self._times, self._plain, self._knows_matches = times, times.plain, knows_matches
        self.times, self._cached = times, 0  # tokens in the cache, before the step that was chosen last
        self._copying, self._experience = copying or {}, experience or Experience()
        self._with_text: dict[tuple[int, int], Proposer] = {}  # by rows and id of the kind without what is copied
        if knows_matches:
            pairs = [(size, each) for size, of in kinds.items() for each in of if each.without_text]
            self._with_text = {(size, id(each.without_text)): each for size, each in pairs}
            kinds = {size: [_search(each) for each in of] for size, of in kinds.items()}
        self._kinds = kinds
        self._experience.promise.forget()
        self._steps: dict[int, int] = defaultdict(int)
        best = {size: max(of, key=partial(self._value, StepRows(size, size, size))) for size, of in kinds.items() if of}
        super().__init__(best)

    @property
    def proposers(self) -> list[Proposer]:
        """All that may draft, whatever the number of rows."""
        kinds = chain.from_iterable(self._kinds.values())
        return [self._plain, *self._copying.values(), *self._with_text.values(), *kinds]

    def first(self, size: int) -> Proposer:
        """Return what the next step of so many rows drafts with, if it does not pause."""
        return self._trees.get(size, self._plain)

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step; to be called once for each step."""
        self._cached, size, match = step.cached, step.size, step.match is not False
        if self._times.wants(size, self._plain, ENOUGH):
            return self._plain  # all other steps are compared with it
        value, kinds = partial(self._value, step), self._kinds.get(size, ())
        cheapest = min(kinds, key=partial(self._cost, size), default=self._plain)
        usable = cheapest.depth and (match or isinstance(_search(cheapest), SearchProposer))
        allowance = self._experience.allowance(size)
        if not usable or not allowance.drafts(step.rows, self._cost(size, cheapest) - 1):
            copying = self._copying.get(size, self._plain) if match else self._plain
            return copying if value(copying) >= MARGIN * value(self._plain) else self._plain
        if not allowance.pays:  # the cheapest kind tells as much of what others promise
            self._experience.promise.forget(FORGOTTEN_BY_RETRY)
            return cheapest
        self._steps[size] += 1
        used = self._trees[size]
        if self._steps[size] % RECHECK == 0 and len(kinds) > 1:
            best = max(kinds, key=partial(self._value, step._replace(prompt_tokens=0)))
            if value(best) > MARGIN * value(used):
                self._trees[size] = used = best
        if match and (both := self._with_text.get((size, id(used)))) is not None:
            best = max(used, both, self._copying.get(size, used), key=value)
            if best is used:
                self._experience.copied += RECALL * (PRIOR_COPIED - self._experience.copied)
            used = best
        # Other trees would be steps of other shapes, for as long as prompts are read alone.
        return max(used, self._plain, key=value) if step.prompt_tokens else used

    def record(self, step: DraftedStep) -> None:
        """Record what became of a step's drafts."""
        known, search, drafting = self._experience, _search(step.proposer), len(step.accepted)
        share, accepted = _share(drafting), sum(step.accepted)
        gained = accepted
        if isinstance(search, SearchProposer):
            gained = step.copied
            known.promise.observe(drafting, search.beams, step.outcomes)
            if search is not step.proposer:
                known.copied += share * (step.copied / drafting - known.copied)
        known.copied_alone += share * (gained / drafting - known.copied_alone)
        if not (kinds := self._kinds.get(step.size)):
            return
        value = partial(self._value, StepRows(step.size, step.rows, drafting))
        # Where steps know of matches, copies are no rival of a search: it is left out in steps that have some to copy.
        copying = self._plain if self._knows_matches else self._copying.get(step.size, self._plain)
        pays = max(map(value, kinds)) >= MARGIN * max(value(self._plain), value(copying))
        gained_steps = (step.rows + accepted) / step.rows - self._cost(step.size, step.proposer)
        known.allowance(step.size).observe(drafting, gained_steps, pays=pays)

    def _cost(self, size: int, proposer: Proposer) -> float:
        """Return the time of a step with a proposer, in steps without drafts."""
        return self._times.of(proposer, size, 0, self._cached) / self._times.of(self._plain, size, 0, self._cached)

    def _value(self, step: StepRows, proposer: Proposer) -> float:
        """Return the tokens that a step with a proposer promises, per time."""
        known, search = self._experience, _search(proposer)
        cost = self._times.of(proposer, step.size, step.prompt_tokens, self._cached)
        if not isinstance(search, SearchProposer):
            return (step.rows + step.drafting * known.copied_alone * bool(proposer.depth)) / cost
        drafts = search.nodes - 1.0
        if search.shared_nodes is not None:
            drafts = (step_tokens(search, step.size) - step.size) / max(step.drafting, 1)
        gained = known.promise.accepted(search.beams, search.depth, drafts)
        if search is not proposer:
            gained += known.copied
        return (step.rows + step.drafting * gained) / cost


def _search(proposer: Proposer) -> Proposer:
    """Return what drafts but for what is copied beside it."""
    return proposer.without_text or proposer


def _share(drafting: int) -> float:
    """Return how much a step of so many rows counts beside those before it."""
    return min(max(drafting / WINDOW, LEAST_SHARE), 1.0)
