"""Report of an evaluation, as a JSON document and as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.facts import hardware, versions
from redrafter.train.evaluate.replay import ReplayStats
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.evaluate.texts import Texts, repeated_share

if TYPE_CHECKING:
    from redrafter.train.evaluate.command import EvaluateOptions

__all__ = ["TemperatureResult", "format_report", "make_report"]

REPEATED_TOKENS = 4  # tokens of a run that counts as repeated if it occurred before


@dataclass(frozen=True)
class TemperatureResult:
    """Texts of one temperature and what a drafter is worth on them.

    Attributes:
        texts: Texts that the base wrote.
        shapes: Shapes of the tree.
        stats: Statistics for each shape, for each text.
    """

    texts: Texts
    shapes: list[Shape]
    stats: list[list[ReplayStats]]


def make_report(
    pair: Pair, options: "EvaluateOptions", categories: dict[str, int], results: Sequence[TemperatureResult]
) -> dict[str, Any]:
    """Make the JSON document.

    Args:
        pair: Pair that was measured.
        options: How it was measured.
        categories: Number of prompts of each category; the texts stand in the order of the categories.
        results: What was measured at each temperature.
    """
    target = pair.engine.target
    return {
        "model": short_name(pair.name),
        "drafter": short_name(str(pair.drafting_model)),
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
        "seed": options.seed,
        "seeds": "prompt i, of all in their order, is written on under seed + i",
        "sampling": "temperature alone: no top-k, no top-p, no penalty",
        "new_tokens": options.new_tokens,
        "batch_size": options.batch_size,
        "prompts": {
            "files": [short_name(file) for file in options.prompts],
            "categories": categories,
            "share_of_a_text": options.prompt_share,
            "most_tokens_of_a_text": options.prompt_tokens,
        },
        "temperatures": [_describe_temperature(result, categories) for result in results],
    }


def _describe_temperature(result: TemperatureResult, categories: dict[str, int]) -> dict[str, Any]:
    spans, first = dict[str, slice](), 0
    for category, count in categories.items():
        spans[category] = slice(first, first + count)
        first += count
    return {
        "temperature": result.texts.temperature,
        "texts": {name: _describe_texts(result.texts, span) for name, span in spans.items()},
        "all_texts": _describe_texts(result.texts, slice(None)),
        "trees": [
            _describe_tree(shape, stats, spans) for shape, stats in zip(result.shapes, result.stats, strict=True)
        ],
    }


def _describe_texts(texts: Texts, span: slice) -> dict[str, Any]:
    continuations, ended = texts.continuations[span], texts.ended[span]
    return {
        "texts": len(continuations),
        "tokens": sum(map(len, continuations)),
        f"repeated_{REPEATED_TOKENS}_grams": repeated_share(continuations, REPEATED_TOKENS),
        "ended": sum(ended) / len(ended),
    }


def _describe_tree(shape: Shape, stats: list[ReplayStats], spans: dict[str, slice]) -> dict[str, Any]:
    by_category = {name: _describe_stats(shape, stats[span]) for name, span in spans.items()}
    entries = list(by_category.values())
    return {
        "tree": str(shape),
        "beams": shape.beams,
        "depth": shape.depth,
        "nodes": shape.nodes,
        "categories": by_category,
        "mean_of_categories": {
            "drafts_per_step": _mean([entry["drafts_per_step"] for entry in entries]),
            "tokens_per_step": _mean([entry["tokens_per_step"] for entry in entries]),
            "acceptance": [
                _mean(list(rates)) for rates in zip(*(entry["acceptance"] for entry in entries), strict=True)
            ],
        },
        "all_steps": _describe_stats(shape, stats),
    }


def _describe_stats(shape: Shape, stats: list[ReplayStats]) -> dict[str, Any]:
    total = ReplayStats.sum(shape, stats)
    return {
        "steps": total.steps,
        "tokens": total.emitted,
        "drafts_per_step": total.drafted / total.steps if total.steps else None,
        "tokens_per_step": total.tokens_per_step if total.steps else None,
        "accepted_by_depth": total.accepted_by_depth,
        "tried_by_depth": total.tried,
        "acceptance": total.acceptance,
    }


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def format_report(document: dict[str, Any]) -> Iterator[str]:
    """Format the JSON document as lines of text and tables."""
    used = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    counts = document["prompts"]["categories"]
    files = ", ".join(document["prompts"]["files"]) or "the package"
    yield document["command"]
    yield f"{document['model']}, drafter {document['drafter']}, {document['dtype']}"
    yield f"{document['hardware']}; {used}"
    yield (
        f"{sum(counts.values())} prompts in {len(counts)} categories from {files}; at most {document['new_tokens']} "
        f"new tokens; seed {document['seed']}; {document['sampling']}"
    )
    yield "depth d: the share of the steps that accepted d - 1 drafts, and whose text went on, that accepted one more"
    width = max(map(len, [*counts, "mean of categories"]))
    for result in document["temperatures"]:
        yield ""
        yield f"temperature {result['temperature']:g}"
        yield f"  {'written by the model':<{width}}  texts  tokens  repeated {REPEATED_TOKENS}-grams  ended by itself"
        for name, texts in [*result["texts"].items(), ("all texts", result["all_texts"])]:
            share = _format_number(texts[f"repeated_{REPEATED_TOKENS}_grams"], 16)
            ended = _format_number(texts["ended"], 17)
            yield f"  {name:<{width}}{texts['texts']:7d}{texts['tokens']:8d}  {share}{ended}"
        for tree in result["trees"]:
            yield ""
            yield from _format_tree(tree, width)


def _format_tree(tree: dict[str, Any], width: int) -> Iterator[str]:
    """Format one tree: a line for each category and their mean, if there are several, and one for all steps."""
    depths = "".join(f"{depth:7d}" for depth in range(2, tree["depth"] + 1))
    yield f"  {tree['tree']:<{width}}  tokens/step  drafts/step  depth 1{depths}"
    several = len(tree["categories"]) > 1
    rows = [*tree["categories"].items(), ("mean of categories", tree["mean_of_categories"])] if several else []
    for name, row in [*rows, ("all steps", tree["all_steps"])]:
        numbers = _format_number(row["tokens_per_step"], 13) + _format_number(row["drafts_per_step"], 13, 1)
        yield f"  {name:<{width}}{numbers}  {''.join(_format_number(rate, 7) for rate in row['acceptance'])}"


def _format_number(value: float | None, width: int, digits: int = 3) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
