"""Draft policies, which choose the proposer of each decoding step.

A policy compares proposers by expected tokens per unit of time: by what their steps cost (`step_times.py`) and by the
acceptance of earlier drafts. A budget bounds the time that drafts lose (`loss_budget.py`). The choice affects speed
only, since the target verifies every draft.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import NamedTuple

from redrafter.drafting.loss_budget import DraftLossBudget
from redrafter.drafting.proposer import Proposer, SearchProposer, step_tokens
from redrafter.drafting.step_times import StepCosts, StepTimes
from redrafter.drafting.tree_choice import expected_of

# Minimum speedup that drafts must be expected to give. A call lasts until its slowest row ends, so drafts that help
# only other rows do not shorten it, and steps of many rows need more: at 64 rows, steps that cost 1.55 and gave 1.71
# tokens made a call 3 % slower.
MARGIN, MARGIN_OF_MANY, MANY_ROWS = 1.05, 1.15, 32
# The same for several rows whose texts gain unevenly, as with a table of tokens, and with copies in place of a
# drafter's drafts: a call of 8 sampled texts was 0.88 times as fast as without drafts where its steps gained 1.07, and
# one of 32 greedy texts 0.93 times with 1.2.
MARGIN_OF_UNEVEN = 1.25
# While drafts are expected to give less than this speedup over the cheapest steps, these are taken to be timed.
CLOSE = 2.0
# Weight of the assumed acceptance, in rows of a search or judged drafts, and factors by which earlier steps count less
# at each further one: of the rows of a search, of other drafts, and of a search that is retried after a pause. With
# 0.99 a row, drafts of 8 rows that gain 1.1 are made in 0.63 of the steps, and with 0.98 in 0.42.
PRIOR_WEIGHT, DECAY_PER_ROW, DECAY, DECAY_BY_RETRY = 8.0, 0.99, 0.9, 0.9
# Accepted drafts that are assumed: of a search, relative to `expected_of`; of a draft model, relative to judged
# ones; and of copies from a sequence that has a match, per row.
PRIOR_OF_SEARCH, PRIOR_OF_MODEL, PRIOR_OF_COPIES = 1.0, 0.75, 1.0

MOST_COPIED = 16  # maximum number of drafts to copy for a row in one step; fewer than a quarter are not worth a step
# Maximum number of tokens of all rows in a step to which copied drafts are added: on a CPU, whose steps copy only where
# a sequence has a match, and on a GPU those whose forward takes at most this time, relative to one token.
COPYING_TOKENS, COPYING_COST = 64, 1.25


def text_nodes(size: int, nodes: int, device: str, costs: StepCosts) -> int:
    """Return how many copied drafts to add to each row's tree, or 0 if they would slow the step down.

    Args:
        size: Batch size of the step.
        nodes: Nodes of each row's tree.
        device: Type of the device.
        costs: Costs of steps.
    """
    tokens = COPYING_TOKENS
    if device != "cpu":
        tokens = max(number for number, time in costs.forward if time <= COPYING_COST * costs.forward[0][1])
    count = min(MOST_COPIED, tokens // size - nodes)
    return count if count >= MOST_COPIED // 4 else 0


class StepRows(NamedTuple):
    """Describes the rows of the next step.

    Attributes:
        size: Batch size of the step, including padding rows.
        rows: Rows that hold a sequence.
        drafting: Rows whose sequences accept drafts.
        prompt_tokens: Prompt tokens that the step prefills.
        cached: Tokens of all rows in the KV cache.
        match: Whether any sequence has a match to copy drafts from; None if unknown.
        sampled: Whether any sequence samples.
        unread: Tokens of all rows that a draft model has to read before it drafts.
    """

    size: int
    rows: int
    drafting: int
    prompt_tokens: int = 0
    cached: int = 0
    match: bool | None = None
    sampled: bool = False
    unread: int = 0


class DraftedStep(NamedTuple):
    """Describes a drafted step and the outcome of its drafts.

    Attributes:
        rows: The rows that its proposer was chosen for.
        proposer: The proposer of the drafts.
        accepted: Accepted drafts of each row that took drafts. It has at least one entry.
        levels: Levels of drafts that each row in `accepted` could accept.
        copied: Accepted drafts of all rows that were copied from the sequence and that no other proposer found.
    """

    rows: StepRows
    proposer: Proposer
    accepted: Sequence[int]
    levels: Sequence[int]
    copied: int = 0


class AcceptanceRate:
    """A ratio of accepted drafts to those that could be, of which earlier steps count less and less."""

    def __init__(self, rate: float):
        self._accepted, self._possible = rate * PRIOR_WEIGHT, PRIOR_WEIGHT

    def add(self, accepted: float, possible: float, keep: float = DECAY) -> None:
        """Add the drafts of a step, after which earlier steps keep this part of their weight."""
        self._accepted = keep * self._accepted + accepted
        self._possible = keep * self._possible + possible

    @property
    def value(self) -> float:
        """The ratio."""
        return self._accepted / self._possible


class AcceptanceHistory:
    """Stores the acceptance of an engine's drafts, and the budgets of their losses, across batches.

    Attributes:
        search: Accepted drafts of a search, relative to `expected_of`.
        model: Accepted drafts of a draft model, relative to those that the target judged.
        copies: Accepted copies per row that no other proposer found.
        budget_of_copies: Loss budget of copies.
    """

    def __init__(self) -> None:
        self.search, self.model = AcceptanceRate(PRIOR_OF_SEARCH), AcceptanceRate(PRIOR_OF_MODEL)
        self.copies, self.budget_of_copies = AcceptanceRate(PRIOR_OF_COPIES), DraftLossBudget()
        self._budgets: dict[int, DraftLossBudget] = {}  # by the logarithm of the batch size

    def budget_for(self, size: int) -> DraftLossBudget:
        """Return the loss budget of a batch size, which batch sizes up to the same power of two share."""
        key, largest = (size - 1).bit_length(), MANY_ROWS.bit_length() - 1
        if key not in self._budgets:
            # Rows that end one by one pass through all sizes. With a loss at each, 8 rows were 0.83 times as fast as
            # without drafts where a drafted step takes the time of 4, in the first call of 64 tokens.
            known = [each for each in self._budgets if max(each, key) <= largest]
            nearest = min(known, key=lambda each: abs(each - key), default=None)
            self._budgets[key] = DraftLossBudget() if nearest is None else copy(self._budgets[nearest])
        return self._budgets[key]


class DraftPolicy:
    """Drafts with the same proposer in every step of a batch size.

    Attributes:
        times: Times of steps, if the policy depends on them; None otherwise.
    """

    times: StepTimes | None = None

    def __init__(self, proposers: Mapping[int, Proposer]):
        """Create the policy from one proposer per batch size."""
        self._proposers = proposers

    @property
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""
        return list(self._proposers.values())

    def choices(self, size: int, *, sampled: bool = False, mixed: bool = False) -> Sequence[Proposer]:
        """Return the proposers that steps of a batch size may draft with, first the one to prefer before any step.

        With `mixed`, those of steps that also read prompts.
        """
        return [self._proposers[size]]

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step. Call this exactly once per step."""
        proposer = self._proposers[step.size]
        return proposer if step.match is not False else proposer.without_text or proposer

    def record(self, step: DraftedStep) -> None:
        """Record the outcome of a drafted step."""

    def wants_prompts(self, step: StepRows) -> bool:
        """Return whether a draft model is to read prompts now, because such a step may draft."""
        return True

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Open a context in which a draft model reads tokens of sequences, and whose time drafts have to gain."""
        yield


class CostPolicy(DraftPolicy):
    """Chooses the proposer with the most expected tokens per unit of time, from step costs and earlier acceptance.

    Drafts of a drafter and copies from the sequences have a budget each. While they do not pay, each is retried as
    often as its budget allows. The choice depends only on the costs and on the tokens of earlier steps.
    """

    def __init__(
        self,
        times: StepTimes,
        candidates: Mapping[int, Sequence[Proposer]],
        histories: Mapping[bool, AcceptanceHistory] | None = None,
        copying: Mapping[int, Proposer] | None = None,
        sampled: Mapping[int, Sequence[Proposer]] | None = None,
        *,
        always: bool = False,
    ):
        """Create the policy.

        Args:
            times: Times of steps.
            candidates: Proposers to choose from, by batch size.
            histories: Acceptance of drafts in earlier batches, of greedy steps and of sampled ones; None to start
                without observations.
            copying: Proposers that only copy drafts from the sequences, by batch size; None for no such proposers.
            sampled: Proposers to choose from in steps that sample; None for the same ones.
            always: Whether each step has to draft with one of the candidates.
        """
        self.times: StepTimes = times
        self._undrafted, self._copying, self._always = times.undrafted, copying or {}, always
        self._candidates = {False: candidates, True: candidates if sampled is None else sampled}
        self._histories = defaultdict(AcceptanceHistory) if histories is None else histories
        self._known: tuple[StepRows, dict[int, float]] | None = None  # times of the last step's proposers, by id
        self._unpaid = 0.0  # seconds in which a draft model read tokens, not charged yet

    @property
    def proposers(self) -> list[Proposer]:
        """All proposers that the policy may choose, for any batch size."""
        candidates = (each for kind in self._candidates.values() for of in kind.values() for each in of)
        return [self._undrafted, *self._copying.values(), *dict.fromkeys(candidates)]

    def choices(self, size: int, *, sampled: bool = False, mixed: bool = False) -> Sequence[Proposer]:
        """Return the candidates of a batch size, then the proposer that copies; without any, undrafted steps."""
        if mixed and self._always:
            # Steps that read prompts are captured for each size of their buffers too, so not for each draft length.
            candidates = self._candidates[sampled][size]
            return [candidates[len(candidates) // 2]]
        copies = [self._copying[size]] if size in self._copying else []
        return [*self._candidates[sampled].get(size, ()), *copies] or [self._undrafted]

    def choose(self, step: StepRows) -> Proposer:
        """Return the proposer of the next step. Call this exactly once per step."""
        history, speed = self._histories[step.sampled], partial(self._speed, step)
        candidates = self._candidates[step.sampled].get(step.size, ())
        best, cheapest, loss, pays = self._weigh_drafts(step)
        # The times of all other steps are relative to these. A step that reads prompts is not timed.
        basis = cheapest if self._always else self._undrafted
        lacks_basis = not step.prompt_tokens and self.times.lacks(step.size, basis, sampled=step.sampled)
        if lacks_basis and (not self.times.measured or speed(best) < CLOSE * speed(basis)):
            return basis
        if self._always:
            return self.choices(step.size, sampled=step.sampled, mixed=True)[0] if step.prompt_tokens else best

        # 1. Drafts of a drafter. If matches are unknown, copies compete with them; else step 2 compares the two.
        alone, copiers = self._undrafted, [self._copying.get(step.size, self._undrafted)]
        if candidates and history.budget_for(step.size).allows_drafts(step.rows, loss, pays=pays):
            if not pays:  # a retry: the cheapest candidate gives as much evidence as the others
                history.search.add(0.0, 0.0, DECAY_BY_RETRY)
                return cheapest
            copiers += [each for each in candidates if each.without_text in candidates]
            alone = max((each for each in candidates if each not in copiers), key=speed)

        # 2. Copies from the sequences, in place of these drafts or in addition.
        chosen, copier = alone, max(copiers, key=speed)
        if copier.depth and step.match is not False and (alone is self._undrafted or len(copiers) > 1):
            uneven = alone is self._undrafted and step.drafting > 1 and candidates  # few of several texts repeat
            loss, margin = self._cost(step, copier) - self._cost(step, alone), MARGIN_OF_UNEVEN if uneven else 1.0
            pays = speed(copier) >= margin * speed(alone)
            if history.budget_of_copies.allows_drafts(step.rows, loss, pays=pays):
                chosen = copier
        if step.prompt_tokens and step.size >= MANY_ROWS:
            # Prompts take their time in one step or another. So drafts pay in this one if they gain more than a step
            # without prompts would in the time that they add.
            rate = max(self._speed(step._replace(prompt_tokens=0), each) for each in (chosen, self._undrafted))
            chosen = max(chosen, self._undrafted, key=lambda x: self._tokens(step, x) - rate * self._time(step, x))
        return chosen

    def record(self, step: DraftedStep) -> None:
        """Record the outcome of a drafted step in the history and in the budgets."""
        rows, proposer, drafting = step.rows, step.proposer, len(step.accepted)
        history = self._histories[rows.sampled]
        search = proposer.without_text or proposer
        copied = step.copied if search.beams else sum(step.accepted)
        if search.model is not None:
            # A step judges a row's accepted drafts and the first rejected one, but not the drafts after it.
            levels = [min(level, search.depth) for level in step.levels]
            pairs = list(zip(step.accepted, levels, strict=True))
            history.model.add(sum(map(min, pairs)), sum(min(accepted + 1, most) for accepted, most in pairs))
        elif search.beams:
            drafts = self._drafts(search, rows.size, drafting)
            limits = Counter(step.levels)  # few, of which each one takes 2 us
            expected = (n * expected_of(search, level, drafts, sampled=rows.sampled) for level, n in limits.items())
            history.search.add(sum(step.accepted) - copied, sum(expected), max(DECAY_PER_ROW**drafting, 0.5))
        if search is not proposer or not search.beams:
            if rows.match is not False:
                history.copies.add(copied, drafting)
            cost = self._cost(rows, proposer) - self._cost(rows, proposer.without_text or self._undrafted)
            history.budget_of_copies.observe(copied / rows.rows - cost)
        if search.beams:
            budget = history.budget_for(rows.size)
            if (read := self.times.undrafted_steps(self._unpaid, rows.size, sampled=rows.sampled)) is not None:
                budget.charge(read)
                self._unpaid = 0.0
            budget.observe((rows.rows + sum(step.accepted)) / rows.rows - self._cost(rows, proposer))

    def wants_prompts(self, step: StepRows) -> bool:
        """Return whether a draft model is to read prompts now: not while drafts do not pay."""
        budget = self._histories[step.sampled].budget_for(step.size)
        _, _, loss, pays = self._weigh_drafts(step)
        return self._always or budget.would_allow(step.rows, loss, pays=pays)

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """Record the time of reading in the context, which the next drafted step charges to its budget."""
        began = self.times.clock()
        yield
        if self.times.corrected_every == 1 and not self._always:  # several ranks would measure other times
            seconds = self.times.clock() - began
            self.times.correct_reading(tokens, seconds)
            self._unpaid += seconds

    def _weigh_drafts(self, step: StepRows) -> tuple[Proposer, Proposer, float, bool]:
        """Weigh the drafts of a drafter or draft model; without one, undrafted steps.

        Returns:
            The candidate with the most tokens per unit of time, the one with the cheapest steps, the time that such a
            step loses if all of its drafts are rejected, in undrafted steps, and whether the first one pays.
        """
        candidates, speed = self._candidates[step.sampled].get(step.size, ()), partial(self._speed, step)
        best = max(candidates, key=speed, default=self._undrafted)
        cheapest = min(candidates, key=partial(self._cost, step), default=self._undrafted)
        read = self.times.undrafted_steps(self.times.time_to_read(step.unread), step.size, sampled=step.sampled) or 0.0
        # If matches are unknown, copies compete with these drafts.
        copying = self._copying.get(step.size, self._undrafted) if step.match is None else self._undrafted
        rival, search = max(speed(self._undrafted), speed(copying)), best.without_text or best
        margin = MARGIN_OF_MANY if step.drafting >= MANY_ROWS else MARGIN
        if step.drafting > 1 and isinstance(search, SearchProposer) and search.gains_unevenly:
            margin = MARGIN_OF_UNEVEN
        return best, cheapest, self._cost(step, cheapest) - 1 + read, speed(best) >= margin * rival

    def _cost(self, step: StepRows, proposer: Proposer) -> float:
        """Return the time of a step that reads no prompts, in undrafted steps of the same rows."""
        if step.prompt_tokens:
            step = step._replace(prompt_tokens=0)
        return self._time(step, proposer) / self._time(step, self._undrafted)

    def _time(self, step: StepRows, proposer: Proposer) -> float:
        """Return the estimated time of a step with a proposer."""
        if self._known is None or self._known[0] is not step:
            self._known = step, {}
        known = self._known[1]
        if id(proposer) not in known:
            known[id(proposer)] = self.times.time_of(
                proposer, step.size, step.prompt_tokens, step.cached, sampled=step.sampled
            )
        return known[id(proposer)]

    def _speed(self, step: StepRows, proposer: Proposer) -> float:
        """Return the expected tokens per unit of time of a step with a proposer."""
        return self._tokens(step, proposer) / self._time(step, proposer)

    def _tokens(self, step: StepRows, proposer: Proposer) -> float:
        """Return the expected tokens of a step with a proposer."""
        history, search, gained = self._histories[step.sampled], proposer.without_text or proposer, 0.0
        if search.model is not None:
            chance = history.model.value
            gained = sum(chance**level for level in range(1, search.depth + 1))
        elif search.beams:
            drafts = self._drafts(search, step.size, step.drafting)
            gained = history.search.value * expected_of(search, search.depth, drafts, sampled=step.sampled)
        if proposer.depth > search.depth * bool(search.beams) and step.match is not False:
            gained += history.copies.value
        return step.rows + step.drafting * gained

    @staticmethod
    def _drafts(search: Proposer, size: int, drafting: int) -> float:
        """Return the mean number of verified drafts of a row; rows that take no drafts leave theirs to the others."""
        if search.shared_nodes is None:
            return search.nodes - 1
        return (step_tokens(search, size) - size) / max(drafting, 1)
