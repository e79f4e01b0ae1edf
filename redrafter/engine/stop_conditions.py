"""Conditions that end a text, read from the stopping criteria that transformers prepared."""

from typing import NamedTuple

from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

__all__ = ["StopConditions", "read_criteria"]


class StopConditions(NamedTuple):
    """What ends the texts of a call.

    Attributes:
        max_length: The most tokens of a row, its padding included.
        eos: Ids that end a row.
        deadline: `time.time()` after which no step begins; infinity for none.
        criteria: The other criteria, which are asked token by token on the host.
    """

    max_length: int
    eos: frozenset[int]
    deadline: float
    criteria: list[StoppingCriteria]


def read_criteria(criteria: StoppingCriteriaList, max_length: int) -> StopConditions:
    """Read the criteria that transformers prepared; `max_length` is the one of a call without such a criterion."""
    lengths, eos, deadline = list[int](), frozenset[int](), float("inf")
    others = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos |= set(criterion.eos_token_id.tolist())
        elif type(criterion) is MaxTimeCriteria:
            deadline = min(deadline, criterion.initial_timestamp + criterion.max_time)
        else:
            others.append(criterion)
    return StopConditions(min(lengths, default=max_length), eos, deadline, others)
