"""The prompts that a drafter is measured on, by category."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from redrafter.data.documents import sample_prompts
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import read_prompts

__all__ = ["categories"]


def categories(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    longest: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> dict[str, list[list[int]]]:
    """Token ids of at most `count` prompts of at most `longest` tokens of each category: a row's own, else its file's
    name. None: all of them. No files: the prompts that ship. share, most: of a text, how much of it is a prompt.

    Raises `ArgumentError` where nothing is left, and `CheckpointError` naming the row that cannot be read.
    """
    found: dict[str, list[list[int]]] = {}
    sources: Sequence[str | None] = files or [None]
    for file in sources:
        rows: dict[str, list[Row]] = {}
        for row in read_prompts(file):
            rows.setdefault(row.source or Path(file or "prompts").name.split(".")[0], []).append(row)
        for category, some in rows.items():
            chosen = sample_prompts(
                some, tokenizer, count or len(some), longest, seed, text_share=share, max_text_tokens=most
            )
            found.setdefault(category, []).extend(chosen)
    found = {category: some[:count] for category, some in found.items() if some}
    if not found:
        named = ", ".join(files) or "the prompts that ship"
        raise ArgumentError(f"{named}: no prompt of 1 to {longest} tokens")
    return found
