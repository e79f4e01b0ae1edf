"""A streamer that prints text while it is generated."""

import os
from collections.abc import Sequence
from typing import TextIO

from transformers import PreTrainedTokenizerBase as Tokenizer

from redrafter.engine.detokenizer import Detokenizer

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def use_color(choice: str, out: TextIO) -> bool:
    """Return whether to print in colour; `auto` enables it on a terminal, unless NO_COLOR (no-color.org) is set."""
    if choice != "auto":
        return choice == "always"
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Printer:
    """A `StepStreamer` that prints the rows of a batch one below the other, each under its heading if it has one.

    The first row that has not ended is printed while it is generated; later rows wait until it has. If an accepted
    draft and a token of the target share a character, it has the colour of the token that completes it.

    Attributes:
        texts: The text of each row so far, without colours.
    """

    def __init__(self, tokenizer: Tokenizer, headings: Sequence[str | None], out: TextIO, *, color: bool = False):
        self._out, self._color = out, color
        self._detokenizers = [Detokenizer(tokenizer) for _ in headings]
        self._waiting = ["" if line is None else line + "\n" for line in headings]
        self._ended = [False] * len(headings)
        self._turn = 0
        self.texts = [""] * len(headings)

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Add the tokens of a step to a row's text, and print all text that is not waiting for a previous row.

        The first `accepted` of the tokens were accepted drafts, which may be printed in colour; the others are the
        target's own.
        """
        self._add(row, self._detokenizers[row].push(tokens[:accepted]), drafted=True)
        self._add(row, self._detokenizers[row].push(tokens[accepted:]))
        if ended:
            self._end(row)
        self._print()

    def end(self) -> None:
        """End every row that has not ended, after a time limit or an interrupt."""
        for row, ended in enumerate(self._ended):
            if not ended:
                self._end(row)
        self._print()

    def _add(self, row: int, text: str, *, drafted: bool = False) -> None:
        self.texts[row] += text
        self._waiting[row] += f"{GREEN}{text}{RESET}" if text and drafted and self._color else text

    def _end(self, row: int) -> None:
        self._ended[row] = True
        self._add(row, self._detokenizers[row].finish())
        self._waiting[row] += "\n"

    def _print(self) -> None:
        for row in range(self._turn, len(self._waiting)):
            self._turn = row
            self._out.write(self._waiting[row])
            self._waiting[row] = ""
            if not self._ended[row]:
                break
        self._out.flush()
