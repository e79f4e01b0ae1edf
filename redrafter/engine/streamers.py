"""Streamers: receivers of the tokens of a call as they are made, row by row or column by column."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from redrafter.errors import ArgumentError


class StepStreamer(Protocol):
    """A streamer that receives each row's tokens as soon as a step has made them, and how many of them were drafted.

    Pass one as `streamer` to `generate`. Ordinary Hugging Face streamers get one `[B]` tensor per output column.
    """

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Take the tokens that a step added to an output row.

        Args:
            row: Index of the output row.
            tokens: Tokens that the step added.
            accepted: Number of leading `tokens` that were drafts.
            ended: Whether the row ended with them.
        """

    def end(self) -> None:
        """End the stream, once every row has ended."""


def takes_columns(streamer: object) -> bool:
    """Return whether a streamer has transformers' interface; `ArgumentError` for an object that is no streamer."""
    step, put, end = (callable(getattr(streamer, name, None)) for name in ("put_step", "put", "end"))
    if streamer is not None and not (end and (put or step)):
        raise ArgumentError(
            f"streamer is an object with the methods put and end, as TextStreamer(tokenizer), or put_step and end; "
            f"got {streamer!r:.80}"
        )
    return isinstance(streamer, BaseStreamer) or (put and not step)


class ColumnStream:
    """Feeds a Hugging Face streamer a column once every row has reached it, as `model.generate` does."""

    def __init__(self, streamer: BaseStreamer, rows: int, pad: int):
        self._streamer, self._pad, self._sent = streamer, pad, 0
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        self._lagging = rows  # rows that must gain tokens, or end, before the next column is complete

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Take the tokens of a row, and pass on the columns that they complete."""
        # Counters instead of a scan of all rows at each call, which would cost rows squared per step.
        lagged = len(self._texts[row]) == self._sent
        self._texts[row].extend(tokens)
        self._ended[row] = ended
        self._lagging -= lagged and (ended or len(self._texts[row]) > self._sent)
        if not self._lagging:  # otherwise no column is complete, and other rows need not be checked
            running = [len(text) for text, done in zip(self._texts, self._ended, strict=True) if not done]
            self._send(min(running, default=max(map(len, self._texts))))
            self._lagging = running.count(self._sent)

    def _send(self, ready: int) -> None:
        for column in range(self._sent, ready):
            tokens = [text[column] if column < len(text) else self._pad for text in self._texts]
            self._streamer.put(torch.tensor(tokens))
        self._sent = max(self._sent, ready)

    def end(self) -> None:
        """Pass on the columns that are left, and end the streamer."""
        self._send(max(map(len, self._texts)))
        self._streamer.end()
