"""Report of an evaluation, as a JSON document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.facts import hardware, versions
from redrafter.train.evaluate.options import EvaluateOptions
from redrafter.train.evaluate.prompt_choice import PromptChoice
from redrafter.train.evaluate.replay import ReplayStats
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.evaluate.texts import Texts, repeated_share

__all__ = ["REPEATED_TOKENS", "TextsResult", "make_report"]

REPEATED_TOKENS = 4  # tokens of a run that counts as repeated if it occurred before


@dataclass(frozen=True)
class TextsResult:
    """Texts of one temperature and one length of prompts, and what a drafter is worth on them.

    Attributes:
        texts: Texts that the base wrote.
        shapes: Shapes of the tree.
        stats: Statistics for each shape, for each text.
        prompt_length: Tokens that the prompts were cut to; None for whole prompts.
    """

    texts: Texts
    shapes: list[Shape]
    stats: list[list[ReplayStats]]
    prompt_length: int | None


def make_report(
    pair: Pair, options: EvaluateOptions, prompts: PromptChoice, results: Sequence[TextsResult]
) -> dict[str, Any]:
    """Make the JSON document.

    Args:
        pair: Pair that was measured.
        options: How it was measured.
        prompts: Prompts of the texts, in the order of the texts.
        results: What was measured at each temperature, after prompts of each length.
    """
    target = pair.engine.target
    return {
        "model": short_name(pair.name),
        "drafter": short_name(str(pair.drafting_model)),
        "adapter": options.adapter and short_name(options.adapter),
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
            "categories": prompts.categories,
            "share_of_a_text": options.prompt_share,
            "most_tokens_of_a_text": options.prompt_tokens,
            "lengths": [length for length in prompts.by_length if length is not None],
            "lengths_left_out": list(prompts.left_out),
            "longest": prompts.longest,
        },
        "temperatures": [_describe_result(result, prompts.categories) for result in results],
    }


def _describe_result(result: TextsResult, categories: dict[str, int]) -> dict[str, Any]:
    spans, first = dict[str, slice](), 0
    for category, count in categories.items():
        spans[category] = slice(first, first + count)
        first += count
    return {
        "temperature": result.texts.temperature,
        "prompt_length": result.prompt_length,
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
