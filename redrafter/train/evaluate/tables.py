"""Tables of an evaluation's report: of each temperature, one of the texts and one of each tree."""

from collections.abc import Iterator
from typing import Any

from redrafter.train.evaluate.report import REPEATED_TOKENS

__all__ = ["format_number", "format_report"]


def format_report(document: dict[str, Any]) -> Iterator[str]:
    """Format the JSON document that `make_report` made as lines of text and tables."""
    yield from _format_facts(document)
    results, lengths = document["temperatures"], len(document["prompts"]["lengths"])
    for first in range(0, len(results), lengths or 1):
        yield ""
        yield f"temperature {results[first]['temperature']:g}"
        if lengths:
            yield from _format_lengths(results[first : first + lengths])
        else:
            yield from _format_categories(results[first])


def _format_facts(document: dict[str, Any]) -> Iterator[str]:
    used = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    prompts = document["prompts"]
    counts, files = prompts["categories"], ", ".join(prompts["files"]) or "the package"
    yield document["command"]
    yield f"{document['model']}, drafter {document['drafter']}, {document['dtype']}"
    yield f"{document['hardware']}; {used}"
    yield (
        f"{sum(counts.values())} prompts in {len(counts)} categories from {files}; at most {document['new_tokens']} "
        f"new tokens; seed {document['seed']}; {document['sampling']}"
    )
    if prompts["lengths"]:
        yield "after each length of prompts the model goes on from the same tokens; what stands before them differs"
    if prompts["lengths_left_out"]:
        lengths = ", ".join(map(str, prompts["lengths_left_out"]))
        yield f"not measured: prompts of {lengths} tokens, for the longest prompt has {prompts['longest']}"
    yield "depth d: the share of the steps that accepted d - 1 drafts, and whose text went on, that accepted one more"


def _format_categories(result: dict[str, Any]) -> Iterator[str]:
    """Format one result: in each table, a line for each category and one for all."""
    width = max(map(len, [*result["texts"], "mean of categories"]))
    yield from _format_texts({**result["texts"], "all texts": result["all_texts"]}, width)
    for tree in result["trees"]:
        several = len(tree["categories"]) > 1
        rows = {**tree["categories"], "mean of categories": tree["mean_of_categories"]} if several else {}
        yield from _format_tree(tree, {**rows, "all steps": tree["all_steps"]}, width)


def _format_lengths(results: list[dict[str, Any]]) -> Iterator[str]:
    """Format the results of one temperature: in each table, a line for each length of prompts."""
    names = [f"prompts of {result['prompt_length']} tokens" for result in results]
    width = max(map(len, [*names, "written by the model"]))
    yield from _format_texts(dict(zip(names, (result["all_texts"] for result in results), strict=True)), width)
    for trees in zip(*(result["trees"] for result in results), strict=True):
        rows = (tree["all_steps"] for tree in trees)
        yield from _format_tree(trees[0], dict(zip(names, rows, strict=True)), width)


def _format_texts(rows: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    """Format what the model wrote, by the name of a row."""
    yield f"  {'written by the model':<{width}}  texts  tokens  repeated {REPEATED_TOKENS}-grams  ended by itself"
    for name, texts in rows.items():
        share = format_number(texts[f"repeated_{REPEATED_TOKENS}_grams"], 16)
        ended = format_number(texts["ended"], 17)
        yield f"  {name:<{width}}{texts['texts']:7d}{texts['tokens']:8d}  {share}{ended}"


def _format_tree(tree: dict[str, Any], rows: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    """Format the steps with one tree, by the name of a row, after a blank line."""
    depths = "".join(f"{depth:7d}" for depth in range(2, tree["depth"] + 1))
    yield ""
    yield f"  {tree['tree']:<{width}}  tokens/step  drafts/step  depth 1{depths}"
    for name, row in rows.items():
        numbers = format_number(row["tokens_per_step"], 13) + format_number(row["drafts_per_step"], 13, 1)
        yield f"  {name:<{width}}{numbers}  {''.join(format_number(rate, 7) for rate in row['acceptance'])}"


def format_number(value: float | None, width: int, digits: int = 3) -> str:
    """Format a number right-aligned in `width` characters; a dash for None."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
