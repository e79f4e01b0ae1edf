"""A streamer that prints text as it is made."""

import os
from collections.abc import Sequence
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer

__all__ = ["Printer", "use_color"]

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def use_color(choice: str, out: TextIO) -> bool:
    """choice: `always`, `never`, or `auto`: a terminal that can, unless NO_COLOR (no-color.org) is set."""
    if choice != "auto":
        return choice == "always"
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Printer:
    """A `StepStreamer` that prints rows in order: one row as it is made, those after it when its turn has come.

    headings: a line before each row's text, None for no line. Accepted drafts are green when `color`; a character
    that a draft and the target's own token share has the colour of the one that completes it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, headings: Sequence[str | None], out: TextIO, *, color: bool = False
    ):
        self._out, self._color, self._headings = out, color, headings
        self._detokenizers = [Detokenizer(tokenizer) for _ in headings]
        self._waiting: list[list[str]] = [[] if line is None else [line + "\n"] for line in headings]
        self._ended = [False] * len(headings)
        self._turn = 0
        self.texts = [""] * len(headings)  # what each row has come to, without colours

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        self._add(row, self._detokenizers[row].push(tokens[:accepted]), drafted=True)
        self._add(row, self._detokenizers[row].push(tokens[accepted:]), drafted=False)
        if ended:
            self._end(row)
        self._print()

    def end(self) -> None:
        """Close every row that is still open: its time was up, or somebody stopped it."""
        for row, ended in enumerate(self._ended):
            if not ended:
                self._end(row)
        self._print()

    def _add(self, row: int, text: str, *, drafted: bool) -> None:
        if text:
            self.texts[row] += text
            self._waiting[row].append(f"{GREEN}{text}{RESET}" if drafted and self._color else text)

    def _end(self, row: int) -> None:
        self._ended[row] = True
        self._add(row, self._detokenizers[row].finish(), drafted=False)
        self._waiting[row].append("\n")

    def _print(self) -> None:
        while self._turn < len(self._waiting):
            self._out.write("".join(self._waiting[self._turn]))
            self._waiting[self._turn].clear()
            if not self._ended[self._turn]:
                break
            self._turn += 1
        self._out.flush()
