"""Tokens of an answer, and how speculation went."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from redrafter.scheduler.sequence import Stats
from redrafter.serve.answers.choice import Choice
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["count_usage", "speculation_metrics", "summarize", "usage_and_metrics"]


def usage_and_metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return usage and metrics of an answer. A prompt counts once, however many texts follow it."""
    sequences = [choice.sequence for choice in choices if choice.sequence is not None]
    usage = count_usage(choices, {tuple(sequence.prompt): sequence for sequence in sequences}.values())
    return {
        "usage": usage,
        "metrics": {"speculative_decoding": speculation_metrics([sequence.stats for sequence in sequences])},
    }


def summarize(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts that the log has of an answer, or of as much of it as was written before the client left."""
    sequences = [choice.sequence for choice in choices if choice.sequence is not None]
    if not sequences:
        return {}
    usage = count_usage(choices, {tuple(sequence.prompt): sequence for sequence in sequences}.values())
    waits = [
        sequence.first_token_at - sequence.arrived_at for sequence in sequences if sequence.first_token_at is not None
    ]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": round(min(waits), 4) if waits else None,
        "tokens_per_step": round(
            speculation_metrics([sequence.stats for sequence in sequences])["mean_acceptance_length"], 3
        ),
        "finish": ",".join(choice.finish or "left" for choice in choices),
    }


def count_usage(choices: Iterable[Choice], prompts: Collection[ServedSequence]) -> dict[str, Any]:
    """Return the usage so far. The tokens of `prompts` count as read, those of `choices` as written."""
    read, written = sum(len(sequence.prompt) for sequence in prompts), sum(choice.token_count for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.reused for sequence in prompts)},
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return how speculation went, under vLLM's names (vllm-project/vllm#48915).

    Plain steps do not count; a step in which the other rows left a row no draft does. `mean_acceptance_length` counts
    the token that follows the accepted drafts too; entry j of `acceptance_histogram` counts the steps that accepted
    exactly j drafts; entry d of `acceptance_by_depth`, which vLLM lacks, is the share of the steps with d accepted
    drafts or more that accepted one more.

    Args:
        stats: Counts of each sequence.
    """
    steps, drafted, accepted = (
        sum(getattr(entry, name) for entry in stats) for name in ("draft_steps", "drafted", "accepted")
    )
    depth = max((len(entry.accepted_by_depth) for entry in stats), default=0)
    reached = [steps, *(sum(entry.accepted_by_depth[d] for entry in stats) for d in range(depth))]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
        "acceptance_by_depth": [b / a if a else None for a, b in pairwise(reached)],
    }
