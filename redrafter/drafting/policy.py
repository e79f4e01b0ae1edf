"""Draft policies, which choose the proposer of each decoding step.

A policy holds the proposers that are available for each batch size. It chooses one by the cost of a step
(`step_times.py`) and by the acceptance of earlier drafts (`estimates.py`), and records the outcome of each drafted
step. The choice affects speed only, since the target verifies every draft.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

from redrafter.drafting.draft_model import DraftModelProposer
from redrafter.drafting.estimates import (
    LEAST_SHARE,
    RECALL,
    WINDOW,
    StepCosts,
)
from redrafter.drafting.loss_budget import (
    DECAY_PER_STEP,
    MANY_ROWS,
    PRIOR_ACCEPTED,
    PRIOR_JUDGED,
    AcceptanceHistory,
    DraftLossBudget,
)
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.drafting.step_times import StepTimes

RECHECK = 4  # drafted steps between two selections of the best candidate
# While drafts are expected to give less than this speedup, undrafted steps are taken to correct their costs.
CLOSE = 2.0
MARGIN = 1.05  # minimum speedup that a proposer must be expected to give before it replaces another
# A call lasts until its slowest row ends, so drafts that help only other rows do not shorten it. So steps of many rows
# begin to draft only where that is expected to give much, and continue where it still gives some. Whether it does is
# judged by probes, which draft what costs least.
MARGIN_TO_BEGIN, MARGIN_TO_CONTINUE, PROBES = 1.15, 1.1, 2
FORGOTTEN_BY_RETRY = 0.9  # factor that a retry applies to the weight of earlier acceptance counts
PRIOR_COPIED = 1.0  # accepted drafts per row that are assumed for a matching sequence
COPIES_COST = 0.1  # time that copied drafts add to a step, relative to the step without them

# Maximum number of tokens of all rows in a step to which copied drafts are added. The matrix products of a bf16 8B
# model on an H200 take 3.97/4.04/4.24/4.64/6.0/7.3 ms for 1/26/64/128/208/256 tokens: up to about 128 they are
# memory-bound.
COPYING_TOKENS = {"cuda": 128, "cpu": 64}
# Maximum measured time of a step with copied drafts, relative to a step of one token. FP8 weights become compute-bound
# at fewer tokens.
COPYING_COST = 1.25
MOST_COPIED, LEAST_COPIED = 16, 4  # maximum and minimum number of drafts to copy for a row in one step


def text_nodes(size: int, nodes: int, device: str = "cuda", measured: StepCosts | None = None) -> int:
    """Return how many copied drafts to add to each row's tree, or 0 if they would slow the step down.

    Args:
        size: Batch size of the step.
        nodes: Nodes of each row's tree.
        device: Type of the device.
        measured: Measured step costs, if any. They are ignored on a CPU, whose steps copy drafts only when a sequence
            has a match.
    """
    tokens = COPYING_TOKENS[device]
    if measured is not None and device != "cpu":
        most = COPYING_COST * measured.steps[0][1]
        tokens = max(number for number, time in measured.steps if number <= tokens and time <= most)
    count = min(MOST_COPIED, tokens // size - nodes)
    return count if count >= LEAST_COPIED else 0


class StepRows(NamedTuple):
    """Describes the rows of the next step.

    Attributes:
        size: Batch size of the step, including padding rows.
        rows: Rows that hold a sequence.
        drafting: Rows whose sequences accept drafts.
        prompt_tokens: Prompt tokens that the step prefills.
        cached: Tokens of all rows in the KV cache.
        match: Whether any sequence has a match to copy drafts from; None if unknown.
        indices: Index of each row's sequence within its call.
        sampled: Whether any sequence samples.
        unread: Tokens of all rows that a draft model has to read before it drafts.
    """

    size: int
    rows: int
    drafting: int
    prompt_tokens: int = 0
    cached: int = 0
    match: bool | None = None
    indices: Sequence[int] = ()
    sampled: bool = False
    unread: int = 0


class DraftedStep(NamedTuple):
    """Describes a drafted step and the outcome of its drafts.

    Attributes:
        size: Batch size of the step, including padding rows.
        rows: Rows that held a sequence.
        proposer: The proposer of the drafts.
        accepted: Accepted drafts of each row that took drafts. It has at least one entry.
        copied: Accepted drafts of all rows that were copied from the sequence and that the search did not find.
        outcomes: Counts of drafts by likelihood, from `count_outcomes`.
        levels: Levels of drafts that each row in `accepted` could accept.
        indices: Index within its call of the sequence of each row in `accepted`.
    """

    size: int
    rows: int
    proposer: Proposer
    accepted: Sequence[int]
    copied: int = 0
    outcomes: Sequence[Sequence[int]] = ()
    levels: Sequence[int] = ()
    indices: Sequence[int] = ()


class DraftPolicy(ABC):
    """Interface of the policies that choose the proposer of each step.

    Attributes:
        times: Times the steps, if the policy depends on measured times; None otherwise.
    """

    times: StepTimes | None = None

    @property
    @abstractmethod
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""

    @abstractmethod
    def first(self, size: int) -> Proposer:
        """Return the proposer that the policy currently prefers for a batch size, regardless of pauses."""

    @abstractmethod
    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step. Call this exactly once per step."""

    @abstractmethod
    def record(self, step: DraftedStep) -> None:
        """Record the outcome of a drafted step."""

    def wants_prompts(self, step: StepRows) -> bool:
        """Return whether a draft model is to read prompts now, because such a step may draft."""
        return True

    def reading(self, tokens: int) -> AbstractContextManager[None]:
        """Return a context in which a draft model reads tokens of sequences, and whose time drafts have to gain."""
        return nullcontext()


class FixedTreePolicy(DraftPolicy):
    """Drafts the same tree in every step of a batch size.

    Copied drafts are omitted from the tree in steps without a match, and while they do not pay.
    """

    def __init__(self, trees: Mapping[int, Proposer]):
        """Create the policy from one proposer per batch size."""
        self._trees = dict(trees)
        self._budget = DraftLossBudget()  # of copied drafts
        self._copied = 2 * COPIES_COST  # running mean of accepted copied drafts per row

    @property
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""
        return list(self._trees.values())

    def first(self, size: int) -> Proposer:
        """Return the proposer of a batch size."""
        return self._trees[size]

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the batch size, without copied drafts where they are omitted."""
        tree = self._trees[step.size]
        # Matches are unknown on a GPU. Omitting copied drafts would need another captured step there, which costs more
        # than verifying copied drafts that are rejected.
        if tree.without_text is None or step.match is None:
            return tree
        return tree if step.match and self._budget.allows_drafts(step.drafting, COPIES_COST) else tree.without_text

    def record(self, step: DraftedStep) -> None:
        """Record the accepted copied drafts of a step."""
        if step.proposer.without_text is None:
            return
        rows = len(step.accepted)
        gained = step.copied / rows
        self._copied += _weight(rows) * (gained - self._copied)
        self._budget.observe(rows, gained - COPIES_COST, pays=self._copied >= COPIES_COST)


class DraftLengthPolicy(DraftPolicy):
    """Chooses the draft length of a draft model that maximizes the expected tokens per unit of time.

    A row whose drafts are each accepted with probability a gains 1 + a + ... + a^K tokens in a step of draft length K,
    which takes time 1 + K * cost. The policy estimates a for each row from the row's own drafts, with more weight on
    recent ones, and adds up the tokens of all rows of the batch. Only drafts that the target judged count, so the
    estimate is unbiased.
    """

    def __init__(self, lengths: Mapping[int, Proposer], cost: Callable[[int], float]):
        """Create the policy with prior counts for every row.

        Args:
            lengths: Proposers by draft length.
            cost: Returns, for a number of rows, the time that one more draft adds to a step, relative to an undrafted
                step.
        """
        self._lengths = lengths
        self._cost = cost
        self._accepted: dict[int, float] = defaultdict(lambda: PRIOR_ACCEPTED)  # by the index of a sequence
        self._judged: dict[int, float] = defaultdict(lambda: PRIOR_JUDGED)

    @property
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""
        return list(self._lengths.values())

    def first(self, size: int) -> Proposer:
        """Return the proposer of the longest drafts."""
        return self._lengths[max(self._lengths)]

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer whose draft length gives the most expected tokens per unit of time."""
        chances = [self._accepted[index] / self._judged[index] for index in step.indices]

        def tokens_per_time(length: int) -> float:
            tokens = sum(sum(chance**depth for depth in range(length + 1)) for chance in chances)
            return tokens / (1 + length * self._cost(len(chances)))

        return self._lengths[max(self._lengths, key=tokens_per_time)]

    def record(self, step: DraftedStep) -> None:
        """Update the acceptance estimate of each row that took drafts.

        A step judges a row's accepted drafts and the first rejected draft, but not the drafts after it.
        """
        for index, accepted, levels in zip(step.indices, step.accepted, step.levels, strict=True):
            self._accepted[index] = DECAY_PER_STEP * self._accepted[index] + accepted
            self._judged[index] = DECAY_PER_STEP * self._judged[index] + min(accepted + 1, levels)


class CostPolicy(DraftPolicy):
    """Chooses the proposer with the most expected tokens per unit of time, from step costs and earlier acceptance.

    Steps without a search give no evidence about the drafter. While a search does not pay, the policy therefore retries
    it as often as `DraftLossBudget` allows. In the other steps it copies drafts from the sequences if that pays, or
    drafts nothing. The choice depends only on the costs and on the tokens of earlier steps.
    """

    def __init__(
        self,
        times: StepTimes,
        candidates: Mapping[int, Sequence[Proposer]],
        histories: Mapping[bool, AcceptanceHistory] | None = None,
        copying: Mapping[int, Proposer] | None = None,
        *,
        knows_matches: bool = False,
    ):
        """Create the policy, and select the best candidate of each batch size by the history.

        Args:
            times: Times of steps.
            candidates: Proposers to choose from, by batch size; empty for a batch size at which drafts never pay.
            histories: Acceptance of drafts in earlier batches, of greedy steps and of sampled ones; None to start
                without observations.
            copying: Proposers that only copy drafts from the sequences, by batch size; None for no such proposers.
            knows_matches: Whether `StepRows.match` is known. If so, only steps with a match copy drafts.
        """
        self.times: StepTimes = times
        self._plain = times.plain
        self._copying = copying or {}
        self._histories = histories or {sampled: AcceptanceHistory() for sampled in (False, True)}
        self._unpaid = 0.0  # seconds in which a draft model read tokens, not charged yet
        self._knows_matches = knows_matches
        # Proposers that copy drafts in addition to a search, by batch size and id of the proposer of the search alone.
        self._with_copies: dict[tuple[int, int], Proposer] = {}
        if knows_matches:
            pairs = [(size, each) for size, listed in candidates.items() for each in listed if each.without_text]
            self._with_copies = {(size, id(each.without_text)): each for size, each in pairs}
            candidates = {size: [_without_copies(each) for each in listed] for size, listed in candidates.items()}
        self._candidates = candidates
        self._cached, self._sampled = 0, False  # of the last chosen step, as in `StepRows`
        self._steps: dict[int, int] = defaultdict(int)  # steps with drafts that pay, by batch size
        for history in self._histories.values():
            history.estimator.forget()
        self._selected = {  # by batch size
            size: max(listed, key=partial(self._tokens_per_time, StepRows(size, size, size)))
            for size, listed in candidates.items()
            if listed
        }

    @property
    def _history(self) -> AcceptanceHistory:
        """The history of steps like the last chosen one: sampled drafts are accepted less often than greedy ones."""
        return self._histories[self._sampled]

    @property
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""
        candidates = chain.from_iterable(self._candidates.values())
        return [self._plain, *self._copying.values(), *self._with_copies.values(), *candidates]

    def first(self, size: int) -> Proposer:
        """Return the selected candidate of a batch size, regardless of pauses."""
        return self._selected.get(size, self._plain)

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step. Call this exactly once per step."""
        self._cached, self._sampled = step.cached, step.sampled
        # Calibration: the times of all other steps are relative to undrafted steps. A step that reads prompts is not
        # timed.
        lacks_plain = not step.prompt_tokens and self.times.lacks_plain(step.size, sampled=step.sampled)
        if lacks_plain and (not self.times.measured or self._is_close(step)):
            return self._plain
        cheapest = self._cheapest_candidate(step)
        budget = self._history.budget_for(step.size)
        if cheapest is None or not budget.allows_drafts(step.rows, self._possible_loss(step, cheapest)):
            return self._choose_without_search(step)
        if not budget.pays:  # retry: the cheapest candidate gives as much evidence as the others
            self._history.estimator.forget(FORGOTTEN_BY_RETRY)
            return cheapest
        if step.drafting >= MANY_ROWS and budget.steps < PROBES:
            chosen = cheapest
        else:
            chosen = self._add_copies(step, self._reselect(step))
        if step.prompt_tokens and step.size >= MANY_ROWS:
            # Prompts take their time in one step or another. So drafts pay in this one if they gain more than a step
            # without prompts would in the time that they add. Other candidates are not compared: each would be a step
            # of another shape, used only while prompts are read. In small batches, where drafts add little time, an
            # undrafted step would be of such a shape too.
            alone = step._replace(prompt_tokens=0)
            rate = max(self._tokens_per_time(alone, each) for each in (chosen, self._plain))
            chosen = max(chosen, self._plain, key=partial(self._gain, step, rate))
        return chosen

    def wants_prompts(self, step: StepRows) -> bool:
        """Return whether a draft model is to read prompts now: not while drafts do not pay."""
        self._cached, self._sampled = step.cached, step.sampled
        cheapest = self._cheapest_candidate(step)
        loss = 0.0 if cheapest is None else self._possible_loss(step, cheapest)
        return cheapest is not None and self._history.budget_for(step.size).would_allow(step.rows, loss)

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Record the time of reading in the context, which the next drafted step charges to its budget."""
        began = self.times.clock()
        yield
        if self.times.corrected_every == 1:  # several ranks would measure other times, and draft otherwise
            seconds = self.times.clock() - began
            self.times.correct_reading(tokens, seconds)
            self._unpaid += seconds

    def _possible_loss(self, step: StepRows, proposer: Proposer) -> float:
        """Return the time that a step loses if all of its drafts are rejected, in undrafted steps."""
        read = self.times.plain_steps(self.times.time_to_read(step.unread), step.size, sampled=step.sampled) or 0.0
        return self._relative_cost(step.size, proposer) - 1 + read

    def _is_close(self, step: StepRows) -> bool:
        """Return whether another cost of drafts could change the choice between the selected candidate and none."""
        selected = self._selected.get(step.size)
        value = partial(self._tokens_per_time, step)
        return selected is not None and value(selected) < CLOSE * value(self._plain)

    def _cheapest_candidate(self, step: StepRows) -> Proposer | None:
        """Return the candidate whose step takes the least time; None if it drafts nothing in this step."""
        candidates = self._candidates.get(step.size, ())
        cheapest = min(candidates, key=partial(self._relative_cost, step.size), default=self._plain)
        searches = isinstance(_without_copies(cheapest), SearchProposer | DraftModelProposer)
        return cheapest if cheapest.depth and (searches or step.match is not False) else None

    def _choose_without_search(self, step: StepRows) -> Proposer:
        """Return the proposer that only copies drafts if it pays, and the undrafted one otherwise."""
        copying = self._copying.get(step.size, self._plain) if step.match is not False else self._plain
        copied_value = self._tokens_per_time(step, copying)
        return copying if copied_value >= MARGIN * self._tokens_per_time(step, self._plain) else self._plain

    def _reselect(self, step: StepRows) -> Proposer:
        """Select the best candidate again every `RECHECK` steps, and return the selected one."""
        size = step.size
        candidates = self._candidates[size]
        self._steps[size] += 1
        if self._steps[size] % RECHECK == 0 and len(candidates) > 1:
            # The selection outlasts the prompts that this step prefills.
            best = max(candidates, key=partial(self._tokens_per_time, step._replace(prompt_tokens=0)))
            if self._tokens_per_time(step, best) > MARGIN * self._tokens_per_time(step, self._selected[size]):
                self._selected[size] = best
        return self._selected[size]

    def _add_copies(self, step: StepRows, search: Proposer) -> Proposer:
        """Return the best of a search, the search with copied drafts, and copied drafts alone.

        Copied drafts are considered only in steps with a match.
        """
        both = self._with_copies.get((step.size, id(search)))
        if step.match is False or both is None:
            return search
        copying = self._copying.get(step.size, search)
        best = max(search, both, copying, key=partial(self._tokens_per_time, step))
        if best is search:  # without new evidence, the estimate returns slowly to the prior, so that copies are retried
            self._history.copied += RECALL * (PRIOR_COPIED - self._history.copied)
        return best

    def record(self, step: DraftedStep) -> None:
        """Record the outcome of a drafted step in the history and in the loss budget of its batch size."""
        self._update_history(step)
        if self._candidates.get(step.size):
            self._update_budget(step)

    def _update_history(self, step: DraftedStep) -> None:
        """Update the estimates of accepted drafts, from a search and from copying."""
        history = self._history
        search = _without_copies(step.proposer)
        drafting = len(step.accepted)
        weight = _weight(drafting)
        copied = sum(step.accepted)
        if isinstance(search, SearchProposer):
            copied = step.copied
            history.estimator.observe(drafting, search.beams, step.outcomes)
            if search is step.proposer:  # nothing was copied
                return
            history.copied += weight * (copied / drafting - history.copied)
        if isinstance(search, DraftModelProposer):
            # A step judges a row's accepted drafts and the first rejected one, but not the drafts after it.
            judged = sum(min(more + 1, most) for more, most in zip(step.accepted, step.levels, strict=True))
            history.kept = DECAY_PER_STEP * history.kept + sum(step.accepted)
            history.judged = DECAY_PER_STEP * history.judged + judged
            return
        history.copied_alone += weight * (copied / drafting - history.copied_alone)

    def _update_budget(self, step: DraftedStep) -> None:
        """Charge or refill the loss budget by the time that the step gained."""
        drafting = len(step.accepted)
        value = partial(self._tokens_per_time, StepRows(step.size, step.rows, drafting))
        # If matches are known, copying does not compete with a search: `_add_copies` compares the two in each step that
        # has a match.
        copying = self._plain if self._knows_matches else self._copying.get(step.size, self._plain)
        budget = self._history.budget_for(step.size)
        margin = MARGIN
        if drafting >= MANY_ROWS:
            margin = MARGIN_TO_CONTINUE if budget.pays and budget.steps >= PROBES else MARGIN_TO_BEGIN
        pays = max(map(value, self._candidates[step.size])) >= margin * max(value(self._plain), value(copying))
        if (read := self.times.plain_steps(self._unpaid, step.size, sampled=self._sampled)) is not None:
            budget.charge(read)
            self._unpaid = 0.0
        cost = self.times.first_cost(step.size, step.proposer, sampled=self._sampled)
        cost = self._relative_cost(step.size, step.proposer) if cost is None else cost
        gained = (step.rows + sum(step.accepted)) / step.rows - cost
        budget.observe(drafting, gained, pays=pays)

    def _relative_cost(self, size: int, proposer: Proposer) -> float:
        """Return the time of a step, in undrafted steps of the same batch size."""
        return self._time(proposer, size) / self._time(self._plain, size)

    def _time(self, proposer: Proposer, size: int, prompt_tokens: int = 0) -> float:
        """Return the estimated time of a step."""
        return self.times.time_of(proposer, size, prompt_tokens, self._cached, sampled=self._sampled)

    def _tokens_per_time(self, step: StepRows, proposer: Proposer) -> float:
        """Return the expected tokens per unit of time of a step with a proposer."""
        return self._tokens(step, proposer) / self._time(proposer, step.size, step.prompt_tokens)

    def _gain(self, step: StepRows, rate: float, proposer: Proposer) -> float:
        """Return the expected tokens of a step with a proposer, less those that its time gives at a rate."""
        return self._tokens(step, proposer) - rate * self._time(proposer, step.size, step.prompt_tokens)

    def _tokens(self, step: StepRows, proposer: Proposer) -> float:
        """Return the expected tokens of a step with a proposer."""
        history = self._history
        search = _without_copies(proposer)
        if isinstance(search, DraftModelProposer):
            chance = history.kept / history.judged
            return step.rows + step.drafting * sum(chance**level for level in range(1, search.depth + 1))
        if not isinstance(search, SearchProposer):
            return step.rows + step.drafting * history.copied_alone * bool(proposer.depth)
        drafts = search.nodes - 1.0
        if search.shared_nodes is not None:
            drafts = (step_tokens(search, step.size) - step.size) / max(step.drafting, 1)
        gained = history.estimator.accepted(search.beams, search.depth, drafts)
        if search is not proposer:
            gained += history.copied
        return step.rows + step.drafting * gained


def _without_copies(proposer: Proposer) -> Proposer:
    """Return the proposer without its copied drafts, or the proposer itself if it copies none."""
    return proposer.without_text or proposer


def _weight(rows: int) -> float:
    """Return the weight of the outcome of a step with `rows` drafted rows in a running mean."""
    return min(max(rows / WINDOW, LEAST_SHARE), 1.0)
