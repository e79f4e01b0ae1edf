"""Read `--prompts` for every command: rows of a file or a dataset, or sixteen that ship with the package.

The rows that ship are pieces of public-domain and CC0 sources (books published before 1923, PEPs, EIPs) that the boxed
pair was not trained on. docs/prompts.md documents the fields of a row.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from redrafter.data.prompts import encode_prompt, sample_prompts
from redrafter.data.rows import Row, check_data, open_lines, read_rows
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
        rows = [Row(f"{source}:{number}", prompt=line.rstrip("\n")) for number, line in open_lines(Path(source))]
    else:
        rows = list(read_rows([source]))
    # The drafter has seen training rows, which would overstate acceptance.
    held_out = [row for row in rows if row.split != "train"]
    if not held_out:
        raise ArgumentError(f"{source} holds no prompts" + (": rows of the split train are left out" if rows else ""))
    return held_out


def check_prompts(name: str) -> None:
    """Raise `ArgumentError` or `CheckpointError` if the file or dataset of prompts does not exist."""
    if (_is_text(name) or name.isdecimal()) and not os.path.isfile(name):
        hint = f"; --num-prompts {name} measures the first {name}" if name.isdecimal() else ""
        raise ArgumentError(f"cannot read prompts from {name}: there is no such file{hint}")
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


@dataclass(frozen=True)
class PromptSource:
    """Chooses prompts from files by category, and cuts them.

    Methods raise `CheckpointError` naming a row that cannot be read.
    """

    files: Sequence[str]  # if empty, the prompts that ship with the package
    tokenizer: "PreTrainedTokenizerBase"  # of the base
    count: int | None = None  # prompts of each category, chosen by the seed; None for all
    seed: int = 0  # of the choice
    share: float = 1.0  # fraction of the tokens of a row of text to use as prompt
    most: int | None = None  # maximum number of tokens of a row of text to use as prompt

    def by_category(self, max_tokens: int) -> dict[str, list[list[int]]]:
        """Choose prompts of at most `max_tokens` tokens of each category.

        A category is the `source` of a row or else the name of its file. Returns the token ids of its prompts. Raises
        `ArgumentError` where no prompt is left.
        """
        chosen: dict[str, list[list[int]]] = {}
        for category, members in self._rows_by_category():
            chosen.setdefault(category, []).extend(self._sample(members, 1, max_tokens, self.most))
        chosen = {category: encoded[: self.count] for category, encoded in chosen.items() if encoded}
        if not chosen:
            raise ArgumentError(f"{self._names()}: no prompt of 1 to {max_tokens} tokens")
        return chosen

    def of_lengths(self, lengths: Sequence[int]) -> dict[int, dict[str, list[list[int]]]]:
        """Choose prompts that have the maximum of some lengths, each 2 or more tokens, and cut them to every length.

        A row of text is first truncated on the right, to `most` or to the longest length. Returns prompts by length and
        category. Raises `ArgumentError` if no prompt has the longest length.
        """
        longest, bos = max(lengths), self.tokenizer.bos_token_id
        whole: dict[str, list[list[int]]] = {}
        for category, rows in self._rows_by_category():
            if kept := self._sample(rows, longest, sys.maxsize, longest if self.most is None else self.most):
                whole[category] = kept
        if not whole:
            raise ArgumentError(
                f"--prompt-lengths {longest}: no prompt of {self._names()} has as many tokens: give shorter lengths"
            )
        # All lengths end with the same tokens, so that only the left context differs.
        return {
            length: {name: [cut_prompt(ids, length, bos) for ids in prompts] for name, prompts in whole.items()}
            for length in sorted({*lengths})
        }

    def _sample(self, rows: list[Row], least: int, longest: int, most: int | None) -> list[list[int]]:
        cut = {"text_share": self.share, "max_text_tokens": most}
        return sample_prompts(rows, self.tokenizer, self.count, longest, self.seed, least=least, **cut)

    def _rows(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield the name of each file and its rows."""
        sources: Sequence[str | None] = self.files or [None]
        for file in sources:
            yield Path(file or "prompts").name.split(".")[0], read_prompts(file)

    def _rows_by_category(self) -> Iterator[tuple[str, list[Row]]]:
        for name, found in self._rows():
            rows: dict[str, list[Row]] = {}
            for row in found:
                rows.setdefault(row.source or name, []).append(row)
            yield from rows.items()

    def _names(self) -> str:
        return ", ".join(self.files) or "the prompts that ship"


def cut_prompt(ids: list[int], length: int, bos: int | None) -> list[int]:
    """Return the last `length` tokens of a prompt, keeping an initial BOS in place of the first one.

    `length` is from 2 to the length of the prompt; `bos` is the BOS id, or None.
    """
    first = ids[:1] if ids[0] == bos else []
    return first + ids[len(ids) - length + len(first) :]
