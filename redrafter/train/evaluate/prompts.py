"""Prompts that a drafter is measured on, by category."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from redrafter.data.prompts import sample_prompts
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import read_prompts

__all__ = ["name_files", "prompts_by_category", "rows_by_category"]


def prompts_by_category(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    max_tokens: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> dict[str, list[list[int]]]:
    """Choose prompts of each category: the `source` of a row or else the name of its file.

    Args:
        files: Files of prompts; the prompts that ship with the package if there are none.
        tokenizer: Tokenizer of the model.
        count: Prompts of each category, chosen by the seed; None for all.
        max_tokens: Tokens of a prompt; longer prompts are left out.
        seed: Seed of the choice.
        share: Share of the tokens of a row of text that is its prompt.
        most: Tokens of a row of text that are its prompt, at most.

    Returns:
        Token ids of the prompts, by category.

    Raises:
        ArgumentError: No prompt is left.
        CheckpointError: A row cannot be read; the message names it.
    """
    chosen: dict[str, list[list[int]]] = {}
    sources: Sequence[str | None] = files or [None]
    for file in sources:
        for category, members in rows_by_category(file).items():
            limit = count or len(members)
            encoded = sample_prompts(
                members, tokenizer, limit, max_tokens, seed, text_share=share, max_text_tokens=most
            )
            chosen.setdefault(category, []).extend(encoded)
    chosen = {category: encoded[:count] for category, encoded in chosen.items() if encoded}
    if not chosen:
        raise ArgumentError(f"{name_files(files)}: no prompt of 1 to {max_tokens} tokens")
    return chosen


def rows_by_category(file: str | None) -> dict[str, list[Row]]:
    """Read the rows of a file of prompts, by category; None stands for the prompts that ship with the package."""
    rows: dict[str, list[Row]] = {}
    for row in read_prompts(file):
        rows.setdefault(row.source or Path(file or "prompts").name.split(".")[0], []).append(row)
    return rows


def name_files(files: Sequence[str]) -> str:
    """Name the files of prompts in an error."""
    return ", ".join(files) or "the prompts that ship"
