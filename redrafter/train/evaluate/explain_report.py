"""Report of what an acceptance comes from, as a part of an evaluation's JSON document and as tables."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redrafter.app.flags import short_name
from redrafter.train.evaluate.advice import advise
from redrafter.train.evaluate.explanation import Explanation
from redrafter.train.evaluate.tables import format_number

__all__ = ["describe_explanation", "format_explanation"]

MISS_NAMES = {
    "outside_head": "head's vocabulary",
    "near_miss": "near miss",
    "wrong_guess": "wrong guess",
    "node_budget": "node budget",
}
MISS_HEADER = "".join(f"  {name}" for name in MISS_NAMES.values())


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """Return the part of the JSON document, with lines of advice."""
    files = [short_name(file) for file in explanation.data]
    return asdict(explanation) | {"data": files, "advice": list(advise(explanation))}


def format_explanation(document: dict[str, Any]) -> Iterator[str]:
    """Format what `describe_explanation` returned as lines of text and tables."""
    for result in document["temperatures"]:
        yield ""
        yield f"why drafts were missed: {document['tree']}, temperature {result['temperature']:g}"
        yield from _format_depths(result["all_steps"])
        yield ""
        yield from _format_endings({**result["categories"], "all": result["all_steps"]})
        yield ""
        yield from _format_buckets("the base gave its token", result["by_probability"])
        yield ""
        yield from _format_buckets("tokens before the draft", result["by_context"])
    yield ""
    yield from _format_comparisons(document)
    yield ""
    yield "what to do"
    yield from (f"  {line}" for line in document["advice"])


def _format_depths(counts: dict[str, Any]) -> Iterator[str]:
    yield f"  depth  tried  accepted{MISS_HEADER}"
    columns = zip(counts["tried"], counts["accepted"], counts["misses"], strict=True)
    for depth, (tried, accepted, misses) in enumerate(columns, 1):
        yield f"  {depth:5d}{tried:7d}{accepted:10d}{_format_misses(misses)}"


def _format_endings(endings: dict[str, dict[str, Any]]) -> Iterator[str]:
    width = max(len(name) for name in (*endings, "how steps ended"))
    yield f"  {'how steps ended':<{width}}  steps{MISS_HEADER}  all accepted  text ended"
    for name, counts in endings.items():
        missed = {miss: sum(depth[miss] for depth in counts["misses"]) for miss in MISS_NAMES}
        ends = f"{counts['all_accepted']:14d}{counts['text_ended']:12d}"
        yield f"  {name:<{width}}{counts['steps']:7d}{_format_misses(missed)}{ends}"


def _format_misses(misses: dict[str, int]) -> str:
    return "".join(f"{misses[miss]:{2 + len(name)}d}" for miss, name in MISS_NAMES.items())


def _format_buckets(title: str, buckets: list[dict[str, Any]]) -> Iterator[str]:
    """Format the buckets that have drafts."""
    missed = sum(bucket["drafts"] - bucket["accepted"] for bucket in buckets)
    yield f"  {title}  drafts  acceptance  share of misses"
    for bucket in buckets:
        drafts, accepted = bucket["drafts"], bucket["accepted"]
        if drafts:
            share = format_number((drafts - accepted) / missed if missed else None, 17)
            yield f"  {bucket['name']:<{len(title)}}{drafts:8d}{format_number(accepted / drafts, 12)}{share}"


def _format_comparisons(document: dict[str, Any]) -> Iterator[str]:
    """Format the drafter's best guesses by text, and the two forms of prompts if they were measured."""
    guesses = {
        f"the base's text, temperature {one['temperature']:g}": one["best_guess"] for one in document["temperatures"]
    }
    if document["best_guess_on_data"] is not None:
        guesses[", ".join(document["data"])] = document["best_guess_on_data"]
    title = "best guess is right"
    width = max(map(len, (title, *guesses)))
    depths = "".join(f"{depth:7d}" for depth in range(2, document["depth"] + 1))
    yield f"  {title:<{width}}  depth 1{depths}"
    for name, shares in guesses.items():
        yield f"  {name:<{width}}  {''.join(format_number(share, 7) for share in shares)}"
    if document["form_prompts"]:
        yield ""
        title = f"{document['form_prompts']} prompts, greedy"
        yield f"  {title:<18}  tokens/step  depth 1{depths}"
        for name in ("plain", "template"):
            form = document[name]
            rates = "".join(format_number(rate, 7) for rate in form["acceptance"])
            yield f"  {name:<18}{format_number(form['tokens_per_step'], 13)}  {rates}"
