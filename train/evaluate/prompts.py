"""The prompts that a drafter is measured on, by category."""

import os
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from redrafter.bench.prompts import encode, read_prompts
from redrafter.errors import ArgumentError
from redrafter.train.data.documents import prompts
from redrafter.train.data.rows import Row, read_rows

__all__ = ["categories"]

ROWS = (".jsonl", ".json", ".gz", ".xz")


def categories(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int | None, longest: int, seed: int
) -> dict[str, list[list[int]]]:
    """Token ids of at most `count` prompts of at most `longest` tokens of each category: a row's own, else its file's
    name. None: all of them. No files: the prompts that ship.

    Rows of the split "train" are left out. Raises `ArgumentError` where nothing is left, and `CheckpointError` naming
    the row that cannot be read.
    """
    found: dict[str, list[list[int]]] = {}
    for file in files or [str(resources.files("redrafter.bench") / "prompts.jsonl")]:
        for category, some in _read(file, tokenizer, count, longest, seed).items():
            found.setdefault(category, []).extend(some)
    found = {category: some[:count] for category, some in found.items() if some}
    if not found:
        named = ", ".join(files) or "the prompts that ship"
        raise ArgumentError(f"{named}: no prompt of 1 to {longest} tokens that is not for training")
    return found


def _read(
    file: str, tokenizer: PreTrainedTokenizerBase, count: int | None, longest: int, seed: int
) -> dict[str, list[list[int]]]:
    name = Path(file).name.split(".")[0]
    if Path(file).suffix == ".txt" or (os.path.isfile(file) and Path(file).suffix not in ROWS):
        lines = [ids for ids in encode(read_prompts(file), tokenizer) if len(ids) <= longest]
        random.Random(seed).shuffle(lines)
        return {name: lines}
    rows: dict[str, list[Row]] = {}
    for row in read_rows([file]):
        if row.split != "train":
            rows.setdefault(row.source or name, []).append(row)
    return {category: prompts(some, tokenizer, count or len(some), longest, seed) for category, some in rows.items()}
