"""Rows of texts and conversations: read them, render them, make prompts of them.

A row is one JSON object on a line:

    {"source": "peps", "id": "pep-0008", "split": "train", "text": "..."}
    {"source": "tldr", "id": "tar", "split": "val", "conversations": [{"role": "user", "content": "..."}, ...]}

`source` names where the row is from (default: the file's name), `split` is "train" (default) or "val". Blanks at the
end of a line, and Windows' line ends, are dropped, because a small model should not spend capacity on what
nobody can see.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from recipe import UserError
from transformers import PreTrainedTokenizerBase

from redrafter.data.rows import open_lines
from redrafter.errors import CheckpointError

Row = dict[str, Any]
ROLES = ("system", "user", "assistant")
CHUNK_CHARS = 2000  # a text gives one prompt for each chunk of this length, so that enough text follows each


@cache
def read_rows(path: str, exclude: tuple[str, ...] = ()) -> list[Row]:
    """Read the rows of a JSONL file (plain, .gz or .xz) in its order, without those of the sources in `exclude`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--data {path!r}: no such file")
    rows = []
    try:
        for number, line in open_lines(file):
            row = _parse(line, where=f"{path}:{number}", source=file.name.partition(".")[0])
            if row["source"] not in exclude:
                rows.append(row)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    if not any(row["split"] == "train" for row in rows):
        raise UserError(f"{path}: no row to train on (sources left out: {', '.join(exclude) or 'none'})")
    return rows


def _parse(line: str, where: str, source: str) -> Row:
    """Parse and check one line; an error names `where` and what was found there."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or ("text" in row) == ("conversations" in row):
        raise UserError(f'{where}: a row is an object with either "text" or "conversations", found {line.strip()[:80]}')
    row = {"source": source, "split": "train"} | row
    if not isinstance(row["source"], str) or row["split"] not in ("train", "val"):
        found = {key: row[key] for key in ("source", "split")}
        raise UserError(f'{where}: "source" must be a string and "split" "train" or "val", found {found}')
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise UserError(f'{where}: "text" must be a string that is not empty, found {row["text"]!r}')
        row["text"] = _tidy(row["text"])
    elif not isinstance(row["conversations"], list) or not row["conversations"]:
        raise UserError(f'{where}: "conversations" must be a list that is not empty, found {row["conversations"]!r}')
    else:
        for turn in row["conversations"]:
            known = isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
            if not known:
                raise UserError(f'{where}: a turn needs a "role" of {", ".join(ROLES)} and a "content", found {turn!r}')
            turn["content"] = _tidy(turn["content"])
    return row


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip(" \t\r") for line in text.split("\n"))


def render(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render a row as one document that holds its special tokens; encode it with `add_special_tokens=False`."""
    if "text" in row:
        return f"{tokenizer.bos_token}{row['text']}{tokenizer.eos_token}"
    return str(tokenizer.apply_chat_template(row["conversations"], tokenize=False))


def prompts(
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    split: str = "val",
    tokens: int = 128,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Make at most `count` prompts from the rows of `split`, the sources taking turns; the same for the same seed.

    A text gives one prompt for each `CHUNK_CHARS`: the first `tokens` tokens at the start of a line, cut back to a
    whole word. A conversation gives one for each assistant turn: the turns before it, if they are at most 4 * `tokens`.

    Returns:
        Dicts of `source`, `prompt` (a string that opens with the bos token) and `ids` (its tokens).
    """
    by_source: dict[str, list[tuple[Row, int]]] = {}
    for row in rows:
        if row["split"] == split:
            by_source.setdefault(row["source"], []).extend((row, place) for place in _places(row))
    makers = []
    for source in sorted(by_source):
        random.Random(f"{seed} {source}").shuffle(by_source[source])
        makers.append(_prompts_at(by_source[source], tokenizer, tokens))
    chosen: list[dict[str, Any]] = []
    while makers and len(chosen) < count:
        drawn = [next(maker, None) for maker in makers]
        makers = [maker for maker, prompt in zip(makers, drawn, strict=True) if prompt]
        chosen += [prompt for prompt in drawn if prompt]
    return chosen[:count]


def _places(row: Row) -> Iterator[int]:
    """Yield where prompts can be cut: characters at which a line starts, or the numbers of the assistant's turns."""
    if "text" not in row:
        yield from (i for i, turn in enumerate(row["conversations"]) if i and turn["role"] == "assistant")
        return
    for chunk in range(0, len(row["text"]), CHUNK_CHARS):
        start = chunk and row["text"].find("\n", chunk, chunk + CHUNK_CHARS) + 1
        if start or not chunk:
            yield start


def _prompts_at(
    places: list[tuple[Row, int]], tokenizer: PreTrainedTokenizerBase, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the prompts of one source, each once."""
    seen = set()
    for row, place in places:
        if "text" in row:
            piece = row["text"][place : place + 8 * tokens].lstrip("\n")  # no text averages 8 characters a token
            ids = tokenizer(piece, add_special_tokens=False, truncation=True, max_length=tokens - 1)["input_ids"]
            words = str(tokenizer.decode(ids)).rpartition(" ")[0].rstrip()
            prompt, max_ids = f"{tokenizer.bos_token}{words}", tokens
        else:
            before = row["conversations"][:place]
            prompt = str(tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True))
            words, max_ids = before[-1]["content"], 4 * tokens
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if words and len(ids) <= max_ids and prompt not in seen:
            seen.add(prompt)
            yield {"source": row["source"], "prompt": prompt, "ids": ids}
