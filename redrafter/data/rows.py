"""Rows of training data, from files and from Hugging Face datasets.

A row is one JSON object, with one of:

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"turns": ["...", "..."]}                              what a user says, turn by turn; good for prompts only
    {"input_ids": [1, 15, 8, 9], "loss_mask": [0, 0, 1, 1]}  tokens, and which of them the base is to write
    {"prompt": "...", "completion": "..."}                 also "response"; without either good for prompts only
    {"instruction": "...", "input": "...", "output": "..."}  prompt: input, a space, instruction; answer: a line feed
                                                           and the output; any but one of the first two may be missing
    "..."                                                  a string alone is a prompt

The last three count only in rows that have none of the keys of the others, and are plain text: no chat template.
`messages` and `conversations` may each hold either kind of turn. `split` may be "train" (when it is left out), "val" or
"test". `source` or `category` names a kind of text, for reports by kind; `tokenizer` is the `fingerprint` of the one
that made the ids. Other keys are left alone, and a key that is null is one that is not there.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.errors import CheckpointError, first_line

__all__ = ["Row", "fingerprint", "open_lines", "read_rows"]

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
SUFFIXES = (".jsonl", ".json", *OPENERS)
HUB = re.compile(r"[\w.-]+(/[\w.-]+)?(:.+)?")
KINDS = ("text", "messages", "conversations", "turns", "input_ids")
ANSWERS = ("completion", "response")
SPLITS = ("train", "val", "test")
SPEAKERS = {"system": "system", "human": "user", "user": "user"} | dict.fromkeys(
    ("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"
)


@dataclass(frozen=True)
class Row:
    """A checked row. where: its file and line, for messages. One of text, messages, ids and prompt is set, loss_mask
    with ids. answer: what the base is to write after the prompt.

    A row that can only be a prompt has messages without an assistant's turn, or a prompt without an answer.
    """

    where: str
    split: str | None = None
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    prompt: str | None = None
    answer: str | None = None
    ids: list[int] | None = None
    loss_mask: list[bool] | None = None
    source: str | None = None
    tokenizer: str | None = None


def read_rows(sources: Iterable[str | Path]) -> Iterator[Row]:
    """The rows of some sources in their order.

    A source is a file (.jsonl, or .json that holds lines or one list; also .gz and .xz), a directory made by
    `save_to_disk`, or a dataset of the hub: "org/name", "org/name:split". Raises `CheckpointError` naming file and
    line.
    """
    for source in map(str, sources):
        entries = _dataset(source) if _is_dataset(source) else _entries(Path(source))
        for where, entry in entries:
            yield _row(entry, where)


def open_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain, .gz or .xz, that are not blank, with their numbers from 1.

    Raises `CheckpointError` naming the file when it cannot be read.
    """
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as lines:
            yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:  # the last: no UTF-8, NUL in a name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """What a file holds, and where."""
    lines = open_lines(path)
    may_be_list = path.name.removesuffix(".gz").removesuffix(".xz").endswith(".json")
    for number, line in lines:
        if may_be_list and line.lstrip().startswith("["):
            whole = line + "".join(rest for _, rest in lines)
            for place, entry in enumerate(_json(whole, str(path)), start=1):
                yield f"{path}:row {place}", entry
        else:
            yield f"{path}:{number}", _json(line, f"{path}:{number}")
        may_be_list = False


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON: {first_line(error)}") from error


def _is_dataset(source: str) -> bool:
    if os.path.isfile(source):  # unlike those of `Path`, these answer for any name
        return False
    hub = HUB.fullmatch(source) is not None and not source.endswith(SUFFIXES)
    return hub or os.path.isdir(source.partition(":")[0])


def _dataset(source: str) -> Iterator[tuple[str, Any]]:
    """What a split of a Hugging Face dataset holds, and where: that of a directory, else that of the hub."""
    try:
        import datasets
    except ImportError as error:
        raise CheckpointError(
            f"{source} is not a file; to read it as a Hugging Face dataset: pip install datasets"
        ) from error
    name, _, split = source.partition(":")
    try:
        if Path(name).is_dir():
            found = datasets.load_from_disk(name)
            found = found if isinstance(found, dict) else {"train": found}
        else:
            found = {split or "train": datasets.load_dataset(name, split=split or "train")}
    except Exception as error:  # a script, a network and many formats stand behind it
        raise CheckpointError(
            f"{source} is not a file, and cannot be read as a Hugging Face dataset: {first_line(error)}"
        ) from error
    if (split or "train") not in found:
        raise CheckpointError(f"{source}: no split {split or 'train'}; write {name}: and one of {', '.join(found)}")
    for place, entry in enumerate(found[split or "train"], start=1):
        yield f"{source}:row {place}", entry


def _row(found: Any, where: str) -> Row:
    """An entry, checked."""
    entry = {"prompt": found} if isinstance(found, str) else found
    entry = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
    kinds = [kind for kind in KINDS if kind in entry] or ["prompt"]
    if len(kinds) != 1 or not any(name in entry for name in (*kinds, "instruction", "input")):
        known = ", ".join((*KINDS, "prompt", "instruction"))
        raise CheckpointError(f"{where}: a row has one of {known}; found {str(found)[:80]}")
    kind, value = kinds[0], entry.get(kinds[0])
    split, source = entry.get("split"), entry.get("source", entry.get("category"))
    if split is not None and split not in SPLITS:
        raise CheckpointError(f'{where}: "split" is one of {", ".join(SPLITS)}; found {split!r}')
    common: dict[str, Any] = {"split": split, "source": source if isinstance(source, str) else None, "tokenizer": None}
    if entry.get("tokenizer") is not None:
        common["tokenizer"] = _string(entry["tokenizer"], where, '"tokenizer"')
    if kind == "prompt":
        prompt, answer = _prompt(entry, where)
        return Row(where, prompt=prompt, answer=answer, **common)
    if kind == "text":
        return Row(where, text=_string(value, where, '"text"'), **common)
    if kind == "input_ids":
        ids, mask = _ids(value, entry.get("loss_mask"), where)
        return Row(where, ids=ids, loss_mask=mask, **common)
    turns = value if isinstance(value, list) else [value]
    if kind == "turns":
        turns = [{"role": "user", "content": turn} for turn in turns]
    return Row(where, messages=[_turn(turn, where) for turn in turns], **common)


def _prompt(entry: dict[str, Any], where: str) -> tuple[str, str | None]:
    """The prompt of a row and its answer, None where it has none."""
    if "prompt" in entry:
        answers = [name for name in ANSWERS if name in entry]
        if len(answers) > 1:
            raise CheckpointError(f"{where}: a prompt has one answer, here both {' and '.join(answers)}; leave one out")
        prompt = _string(entry["prompt"], where, '"prompt"')
        answer = _string(entry[answers[0]], where, f'"{answers[0]}"') if answers else None
    else:
        parts = [_string(entry.get(name, ""), where, f'"{name}"') for name in ("input", "instruction")]
        prompt = " ".join(filter(None, parts))
        answer = "\n" + _string(entry["output"], where, '"output"') if "output" in entry else None
    if not prompt:
        raise CheckpointError(f"{where}: the prompt is empty")
    return prompt, answer


def _string(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {name} must be a string, found {str(value)[:80]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: {name} holds half a surrogate pair, which is no text") from error
    return value


def _turn(turn: Any, where: str) -> dict[str, str]:
    """A turn with the names that chat templates know."""
    found = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
    if "from" in found:
        role = SPEAKERS.get(str(found["from"]))
        if role is None:
            raise CheckpointError(f'{where}: "from" is one of {", ".join(SPEAKERS)}; found {found["from"]!r}')
        found = {"role": role, "content": found.get("value")}
    if not (isinstance(found.get("role"), str) and isinstance(found.get("content"), str)):
        raise CheckpointError(
            f'{where}: a turn needs a "role" and a "content" that are strings; found {str(turn)[:80]}'
        )
    _string(found["content"], where, '"content"')
    return found


def _ids(ids: Any, mask: Any, where: str) -> tuple[list[int], list[bool]]:
    whole = isinstance(ids, list) and set(map(type, ids)) <= {int}  # not bool, which is an int too
    if not whole or not 0 <= min(ids, default=0) <= max(ids, default=0) < 2**31:
        raise CheckpointError(f'{where}: "input_ids" must be a list of token ids, found {str(ids)[:80]}')
    known = isinstance(mask, list) and set(map(type, mask)) <= {int, bool} and set(mask) <= {0, 1}
    if not known or len(mask) != len(ids):
        raise CheckpointError(f'{where}: "loss_mask" must be a list of 0 and 1, one for each of "input_ids"')
    return ids, [bool(each) for each in mask]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that differ between tokenizers whose ids mean different tokens."""
    return _fingerprint(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _fingerprint(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """size: tells a tokenizer from itself before tokens were added."""
    added = sorted((index, str(token)) for index, token in tokenizer.added_tokens_decoder.items())
    told = json.dumps([sorted(tokenizer.get_vocab().items()), added])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
