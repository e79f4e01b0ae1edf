"""From lines of JSON to batches of token ids with a loss mask.

A row is one JSON object on a line, of a .jsonl, .jsonl.gz or .jsonl.xz file:

    {"text": "..."}
    {"conversations": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

`messages` is another name for `conversations`. `split` may be "train" (when it is left out), "val" or "test"; only rows
of "train" are trained on. Other keys are left alone. Conversations are rendered with the tokenizer's chat template and
only the assistant's turns are learnt; of a text, everything is.
"""

import gzip
import json
import lzma
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from redrafter.errors import CheckpointError, UnsupportedError, first_line
from redrafter.train.loss import targets

__all__ = ["Document", "Row", "Windows", "documents", "prompts", "read_rows"]

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
SPLITS = ("train", "val", "test")
POOL = 32  # batches among which windows are sorted by length, so that a batch holds little padding
PROMPT = 64  # longest prompt taken from a plain text, in tokens


@dataclass(frozen=True)
class Row:
    """A checked line. where: its file and line, for messages. Either text or messages is set."""

    where: str
    split: str | None
    text: str | None
    messages: list[dict[str, str]] | None


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them the base itself is to write."""

    ids: list[int]
    mask: list[bool]


def read_rows(files: Iterable[str | Path]) -> Iterator[Row]:
    """The rows of some files in their order. Raises `CheckpointError` naming file and line."""
    for file in map(Path, files):
        try:
            with OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse(line, f"{file}:{number}")
        except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not JSON: {error}") from error
    kinds = [key for key in ("text", "conversations", "messages") if isinstance(row, dict) and key in row]
    if len(kinds) != 1:
        raise CheckpointError(
            f'{where}: a row has one of "text", "conversations", "messages"; found {line.strip()[:80]}'
        )
    split, value = row.get("split"), row[kinds[0]]
    if split is not None and split not in SPLITS:
        raise CheckpointError(f'{where}: "split" is one of {", ".join(SPLITS)}; found {split!r}')
    if kinds == ["text"]:
        if not isinstance(value, str):
            raise CheckpointError(f'{where}: "text" must be a string, found {value!r}')
        return Row(where, split, value, None)
    turns = value if isinstance(value, list) else [value]
    for turn in turns:
        if not (isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
            raise CheckpointError(f'{where}: a turn needs a "role" and a "content" that are strings; found {turn!r}')
    if not any(turn["role"] == "assistant" for turn in turns):
        raise CheckpointError(f"{where}: no assistant turn, so there is nothing to learn")
    return Row(where, split, None, turns)


def documents(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """A row in tokens: one document, or several where the chat template writes earlier turns anew as it goes on.

    Raises `CheckpointError` naming file and line.
    """
    if row.text is not None:
        ids = tokenizer(row.text)["input_ids"]
        found = [Document(ids, [True] * len(ids))]
    else:
        found = [_tokenize(text, spans, tokenizer) for text, spans in _render(row, tokenizer)]
    for document in found:
        if not any(_rollouts(document)):
            raise CheckpointError(
                f"{row.where}: too short: two tokens in a row, after a first, are needed to learn from"
            )
        yield document


def _rollouts(document: Document) -> list[bool]:
    """Which positions are anchors with a target."""
    return targets(torch.tensor([document.mask]), 1).flatten().tolist()


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Rendered texts, each with the spans of its assistant turns, as indices of characters.

    Stock templates do not mark what the assistant wrote. But a turn is what the conversation up to it adds to the
    prompt that asks for it. Where such a prompt does not go on from the text so far (templates that drop earlier turns'
    thinking), the text so far is finished and another begins.
    """
    assert row.messages is not None
    text, spans = "", list[tuple[int, int]]()
    for index, turn in enumerate(row.messages):
        if turn["role"] != "assistant":
            continue
        try:
            prompt = tokenizer.apply_chat_template(row.messages[:index], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(row.messages[: index + 1], tokenize=False)
        except Exception as error:  # a template is a program of its own
            raise CheckpointError(f"{row.where}: the chat template fails: {first_line(error)}") from error
        assert isinstance(prompt, str) and isinstance(whole, str)
        if not whole.startswith(prompt):
            raise CheckpointError(
                f"{row.where}: the chat template asks for the assistant's turn with {prompt[-40:]!r}, but does not "
                "write that turn so; use one that does"
            )
        if spans and not prompt.startswith(text):
            yield text, spans
            spans = []
        text, spans = whole, [*spans, (len(prompt), len(whole))]
    yield text, spans


def _tokenize(text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Document:
    if not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so assistant turns cannot "
            "be told apart; use a base with a fast tokenizer, or rows of plain text"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    # By its end: a tokenizer may leave leading spaces out of a token's span.
    mask = [any(start < end <= stop for start, stop in spans) for end in ends]
    return Document(encoded["input_ids"], mask)


def prompts(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, count: int, longest: int, seed: int
) -> list[list[int]]:
    """At most `count` prompts of at most `longest` tokens: of a conversation all before its first assistant turn, of a
    text the beginning. Which rows: shuffled by seed."""
    chosen = list(rows)
    random.Random(seed).shuffle(chosen)
    found: list[list[int]] = []
    for row in chosen:
        if len(found) == count:
            break
        document = next(documents(row, tokenizer))
        start = min(len(document.ids) // 2, PROMPT) if row.text is not None else document.mask.index(True)
        if 0 < start <= longest:
            found.append(document.ids[:start])
    return found


class Windows:
    """Documents cut into windows of at most `length` tokens. A window never holds two documents.

    bos: where a document opens with this id, so does each of its windows, as every prompt of the base will.
    """

    def __init__(self, documents: Iterable[Document], length: int, bos: int | None = None):
        tokens, masks, ends = array("i"), bytearray(), [0]
        for document in documents:
            opening = [bos] if bos is not None and document.ids[:1] == [bos] else []
            room = length - len(opening)
            for first in range(len(opening), len(document.ids), room):
                window = Document(
                    opening + document.ids[first : first + room],
                    [False] * len(opening) + document.mask[first : first + room],
                )
                if any(_rollouts(window)):
                    tokens.extend(window.ids)
                    masks.extend(window.mask)
                    ends.append(len(tokens))
        self.tokens = torch.tensor(tokens, dtype=torch.int32)  # [M], window after window
        self.mask = torch.tensor(masks, dtype=torch.bool)  # [M]
        self.ends = torch.tensor(ends)  # [windows + 1]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def counts(self, vocab_size: int) -> Tensor:
        """How often each id is to be written, `[V]`."""
        return self.tokens[self.mask].long().bincount(minlength=vocab_size)

    def batches(self, size: int, seed: int, process: int = 0, processes: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches, token ids `[B, T]` and mask `[B, T]`, right-padded to the longest of the batch.

        An epoch is `-(-len(self) // (size * processes))` batches for each process; each sees every `processes`-th.
        """
        lengths = self.ends.diff()
        random = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=random)
            order = order.repeat(-(-size * processes // len(order)) + 1)  # wraps around, to fill the last batches
            order = order[: -(-len(self) // (size * processes)) * size * processes]
            pools = (pool[lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size))
            made = [batch for pool in pools for batch in pool.split(size)]
            for index in torch.randperm(len(made), generator=random)[process::processes].tolist():
                yield self._collate(made[index].tolist())

    def _collate(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        spans = [slice(*self.ends[window : window + 2].tolist()) for window in windows]
        tokens = pad_sequence([self.tokens[span].long() for span in spans], batch_first=True)
        return tokens, pad_sequence([self.mask[span] for span in spans], batch_first=True)
