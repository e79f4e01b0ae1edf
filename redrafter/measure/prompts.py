"""Read `--prompts` for every command: rows of a file or a dataset, or sixteen that ship with the package.

The rows that ship are pieces of public-domain and CC0 sources (books published before 1923, PEPs, EIPs) that the boxed
pair was not trained on. docs/prompts.md documents the fields of a row.
"""

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter.data.prompts import encode_prompt
from redrafter.data.rows import Row, check_data, read_rows
from redrafter.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SUFFIXES = (".jsonl", ".json", ".gz", ".xz")


def read_prompts(name: str | None) -> list[Row]:
    """Read the rows of `name` that are not of the split "train", or those that ship when it is None.

    It names a file of rows or a dataset, as `read_rows` takes it, or a text file with one prompt a line, of which blank
    lines are left out.
    """
    source = str(resources.files("redrafter.measure") / "prompts.jsonl") if name is None else name
    if _is_text(source):
        try:
            # Split at line feeds only: `splitlines` also splits at Unicode line separators, which a prompt may contain.
            lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read prompts from {source}: {error}") from error
        prompts = ((number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip())
        rows = [Row(f"{source}:{number}", prompt=line) for number, line in prompts]
    else:
        rows = list(read_rows([source]))
    # The drafter has seen training rows, which would overstate acceptance.
    held_out = [row for row in rows if row.split != "train"]
    if not held_out:
        raise ArgumentError(f"{source} holds no prompts" + (": rows of the split train are left out" if rows else ""))
    return held_out


def check_prompts(name: str) -> None:
    """Raise `ArgumentError` or `CheckpointError` if the file or dataset of prompts does not exist."""
    if _is_text(name) and not os.path.isfile(name):
        raise ArgumentError(f"cannot read prompts from {name}: there is no such file")
    check_data(name)


def _is_text(source: str) -> bool:
    suffix = Path(source).suffix
    return suffix == ".txt" or (os.path.isfile(source) and suffix not in ROW_SUFFIXES)


def encode(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", *, share: float = 1.0, most: int | None = None
) -> list[list[int]]:
    """Return the token ids of each row's prompt; raise `ArgumentError` that names a row without one.

    The prompt of a row of text is the fraction `share` of its tokens, at most `most` tokens (None for no limit).
    """
    encoded = [encode_prompt(row, tokenizer, text_share=share, max_text_tokens=most) for row in rows]
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            raise ArgumentError(f"{row.where} has no tokens to continue")
    return encoded
