"""Streamers, which are given tokens as they are made."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from redrafter.errors import ArgumentError


class StepStreamer(Protocol):
    """A streamer that wants each row's tokens the moment a step made them, and how many of them were drafted.

    Pass one as `streamer` to `generate`. Ordinary Hugging Face streamers get one `[B]` tensor per output column.
    """

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Take the tokens that a step added to an output row.

        Args:
            row: Index of the output row.
            tokens: What the step added.
            accepted: How many of `tokens`, from the first on, were drafts.
            ended: Whether the row ended with them.
        """

    def end(self) -> None:
        """Take note that every row has ended."""


def takes_columns(streamer: object) -> bool:
    """Return whether a streamer is one of transformers', or like one; `ArgumentError` for an object that is none."""
    step, put, end = (callable(getattr(streamer, name, None)) for name in ("put_step", "put", "end"))
    if streamer is not None and not (end and (put or step)):
        raise ArgumentError(
            f"streamer is an object with the methods put and end, as TextStreamer(tokenizer), or put_step and end; "
            f"got {streamer!r:.80}"
        )
    return isinstance(streamer, BaseStreamer) or (put and not step)


class ColumnStream:
    """Feeds a Hugging Face streamer column by column, each once every row has come to it, as `model.generate` does."""

    def __init__(self, streamer: BaseStreamer, rows: int, pad: int):
        self._streamer, self._pad, self._sent = streamer, pad, 0
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._behind = rows  # rows that must gain tokens, or end, before the next column is complete

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Take the tokens of a row, and pass on the columns that they complete."""
        was_behind = len(self._texts[row]) == self._sent
        self._texts[row].extend(tokens)
        self._ended[row] = ended
        self._behind -= was_behind and (ended or len(self._texts[row]) > self._sent)
        if not self._behind:  # or else no column is complete, and no other row needs to be looked at
            running = [len(text) for text, done in zip(self._texts, self._ended, strict=True) if not done]
            self._send(min(running, default=max(map(len, self._texts))))
            self._behind = running.count(self._sent)

    def _send(self, ready: int) -> None:
        for column in range(self._sent, ready):
            tokens = [text[column] if column < len(text) else self._pad for text in self._texts]
            self._streamer.put(torch.tensor(tokens))
        self._sent = max(self._sent, ready)

    def end(self) -> None:
        """Pass on the columns that are left, and end the streamer."""
        self._send(max(map(len, self._texts)))
        self._streamer.end()
