"""What was measured of a drafter: as one document, and as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redrafter.app.flags import short_name
from redrafter.app.loading import Pair
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.facts import hardware, versions
from redrafter.train.evaluate.replay import Walk
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.evaluate.texts import Texts, repeated

if TYPE_CHECKING:
    from redrafter.train.evaluate.command import EvaluateOptions

__all__ = ["Result", "lines", "report"]

GRAM = 4  # tokens in a run that counts as repeated


@dataclass(frozen=True)
class Result:
    """Texts of one temperature, and their walks: for each shape, for each text."""

    texts: Texts
    shapes: list[Shape]
    walks: list[list[Walk]]


def report(
    pair: Pair, options: "EvaluateOptions", categories: dict[str, int], results: Sequence[Result]
) -> dict[str, Any]:
    """The document. categories: how many of the texts, which stand in their order, belong to each."""
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
        "temperatures": [_temperature(result, categories) for result in results],
    }


def _temperature(result: Result, categories: dict[str, int]) -> dict[str, Any]:
    spans, first = dict[str, slice](), 0
    for category, count in categories.items():
        spans[category] = slice(first, first + count)
        first += count
    return {
        "temperature": result.texts.temperature,
        "texts": {name: _written(result.texts, span) for name, span in spans.items()},
        "all_texts": _written(result.texts, slice(None)),
        "trees": [_tree(*each, spans) for each in zip(result.shapes, result.walks, strict=True)],
    }


def _written(texts: Texts, span: slice) -> dict[str, Any]:
    own, ended = texts.own[span], texts.ended[span]
    return {
        "texts": len(own),
        "tokens": sum(map(len, own)),
        f"repeated_{GRAM}_grams": repeated(own, GRAM),
        "ended": sum(ended) / len(ended),
    }


def _tree(shape: Shape, walks: list[Walk], spans: dict[str, slice]) -> dict[str, Any]:
    by_category = {name: _counted(shape, walks[span]) for name, span in spans.items()}
    each = list(by_category.values())
    return {
        "tree": str(shape),
        "beams": shape.beams,
        "depth": shape.depth,
        "nodes": shape.nodes,
        "categories": by_category,
        "mean_of_categories": {
            "drafts_per_step": _mean([one["drafts_per_step"] for one in each]),
            "tokens_per_step": _mean([one["tokens_per_step"] for one in each]),
            "acceptance": [_mean(list(rates)) for rates in zip(*(one["acceptance"] for one in each), strict=True)],
        },
        "all_steps": _counted(shape, walks),
    }


def _counted(shape: Shape, walks: list[Walk]) -> dict[str, Any]:
    total = Walk.of(shape, walks)
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
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The document for people."""
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
    wide = max(map(len, [*counts, "mean of categories"]))
    for one in document["temperatures"]:
        yield ""
        yield f"temperature {one['temperature']:g}"
        yield f"  {'written by the model':<{wide}}  texts  tokens  repeated {GRAM}-grams  ended by itself"
        for name, texts in [*one["texts"].items(), ("all texts", one["all_texts"])]:
            share = _number(texts[f"repeated_{GRAM}_grams"], 16)
            yield f"  {name:<{wide}}{texts['texts']:7d}{texts['tokens']:8d}  {share}{_number(texts['ended'], 17)}"
        for tree in one["trees"]:
            yield ""
            yield from _table(tree, wide)


def _table(tree: dict[str, Any], wide: int) -> Iterator[str]:
    """One tree: a line for each category and their mean, where there are several, and one for all steps together."""
    depths = "".join(f"{depth:7d}" for depth in range(2, tree["depth"] + 1))
    yield f"  {tree['tree']:<{wide}}  tokens/step  drafts/step  depth 1{depths}"
    several = len(tree["categories"]) > 1
    rows = [*tree["categories"].items(), ("mean of categories", tree["mean_of_categories"])] if several else []
    for name, row in [*rows, ("all steps", tree["all_steps"])]:
        worth = _number(row["tokens_per_step"], 13) + _number(row["drafts_per_step"], 13, 1)
        yield f"  {name:<{wide}}{worth}  {''.join(_number(rate, 7) for rate in row['acceptance'])}"


def _number(value: float | None, wide: int, digits: int = 3) -> str:
    return f"{'-':>{wide}}" if value is None else f"{value:{wide}.{digits}f}"
