"""What the command prints."""

from collections import Counter
from collections.abc import Iterable

from .check import CRASHED, DIFFERENT, EQUAL, REFUSED, UNMADE, Outcome

__all__ = ["counts", "line", "table"]

WEIGHT = (UNMADE, REFUSED, EQUAL, DIFFERENT, CRASHED)
HEAD = "| architecture | outcome | paged | variants |\n|---|---|---|---|\n"


def status(outcomes: dict[str, Outcome]) -> str:
    """Return what an architecture's variants come to: a failure of one counts, and a refusal of all."""
    return max((outcome.status for outcome in outcomes.values()), key=WEIGHT.index, default=CRASHED)


def line(model_type: str, outcomes: dict[str, Outcome]) -> str:
    """Describe an architecture in one line."""
    return f"{model_type:25} {status(outcomes):9} {_details(outcomes)}{_unpaged(outcomes)}".rstrip()


def table(found: Iterable[tuple[str, dict[str, Outcome]]]) -> str:
    """Return all of them as a Markdown table."""
    rows = []
    for model_type, outcomes in found:
        equal = [outcome for outcome in outcomes.values() if outcome.status == EQUAL]
        paged = "" if not equal else next((outcome.unpaged for outcome in equal if outcome.unpaged), "yes")
        details = _details(outcomes)
        told = f"{status(outcomes)}: {details}" if details else status(outcomes)
        rows.append(f"| {model_type} | {_cell(told)} | {_cell(paged)} | {', '.join(outcomes)} |\n")
    return HEAD + "".join(rows)


def counts(found: Iterable[tuple[str, dict[str, Outcome]]]) -> str:
    """Say how many architectures there are of each kind."""
    kinds = Counter(
        f"{EQUAL} on the dense cache only"
        if status(outcomes) == EQUAL and any(outcome.unpaged for outcome in outcomes.values())
        else status(outcomes)
        for _, outcomes in found
    )
    return f"{kinds.total()} architectures: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _details(outcomes: dict[str, Outcome]) -> str:
    """Say what happened to the variants, once for those that share it."""
    by_outcome: dict[tuple[str, str], list[str]] = {}
    for name, outcome in outcomes.items():
        by_outcome.setdefault((outcome.status, outcome.detail), []).append(name)
    if len(by_outcome) == 1:
        return next(iter(by_outcome))[1]
    told = {": ".join(filter(None, outcome)): names for outcome, names in by_outcome.items()}
    return "; ".join(f"[{', '.join(names)}] {outcome}" for outcome, names in told.items())


def _unpaged(outcomes: dict[str, Outcome]) -> str:
    reason = next((outcome.unpaged for outcome in outcomes.values() if outcome.unpaged), None)
    return f" (dense cache only: {reason})" if reason else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
