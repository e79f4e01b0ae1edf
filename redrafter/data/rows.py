"""Rows of training data, from files and from Hugging Face datasets.

A row is one JSON object, with one of:

    {"text": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"turns": ["...", "..."]}                              the user's turns; usable for prompts only
    {"input_ids": [1, 15, 8, 9], "loss_mask": [0, 0, 1, 1]}  token ids, and which of them the base is to write
    {"prompt": "...", "completion": "..."}                 or "response", "chosen"; with none usable for prompts only
    {"instruction": "...", "input": "...", "output": "..."}  or "context" and "response"; prompt: input, a space,
                                                           instruction; answer: a line feed and the output
    "..."                                                  a string alone is a prompt

The last three are read only where a row has none of the other keys, and are plain text: no chat template is applied.
They are conversations where a prompt or an answer is a list of turns (TRL), and next to `system`, `history`, `tools` or
`chat_template_kwargs`, even if these are null. `conversations.py` parses conversations, with the columns that change
their context; what cannot be read of it is refused by name.

`split` is "train" (the default), "val" or "test". `category`, or `source` where there is none, names a kind of text,
for reports by kind. `tokenizer` is the `fingerprint` of the tokenizer that made the ids, and `temperature` is the one
at which a base wrote them, as `redrafter regenerate` records it. Other keys are ignored, and a key that is null counts
as missing.
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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redrafter.data import conversations
from redrafter.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
SUFFIXES = (".jsonl", ".json", ".parquet", *OPENERS)
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>.+))?")
KIND_KEYS = ("text", *conversations.TURN_KEYS, "turns", "input_ids")
PROMPT_KEYS = ("prompt", "instruction", "input")  # read where a row has none of the other keys
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Row:
    """A checked row of data. Exactly one of `text`, `messages`, `prompt` and `ids` is set.

    A row that is usable for prompts only has messages without an assistant's turn, or a prompt without an answer.
    """

    where: str  # file and line of the row, for errors
    split: str | None = None  # `train`, `val` or `test`; None where the row does not say
    text: str | None = None  # a text to learn
    # Turns of a conversation in OpenAI's form, each with `role` and `content`. Turns with `weight` 0 are not learnt.
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # that the assistant may call, in OpenAI's form
    template_kwargs: dict[str, Any] | None = None  # variables of the chat template
    prompt: str | None = None  # a prompt in plain text
    answer: str | None = None  # what the base is to write after `prompt`
    ids: list[int] | None = None  # token ids
    loss_mask: list[bool] | None = None  # of each of `ids`, whether the base is to write it
    source: str | None = None  # kind of text, for reports by kind
    tokenizer: str | None = None  # `fingerprint` of the tokenizer that made `ids`
    temperature: float | None = None  # at which a base wrote it; None where the row does not say


def read_rows(sources: Iterable[str | Path]) -> Iterator[Row]:
    """Yield the rows of data sources, in their order.

    Args:
        sources: Files (.jsonl, or .json that holds lines or one list; also .gz and .xz); directories with .jsonl
            files, which are read in the order of their names; and what `datasets` reads: .parquet files, directories
            that `datasets.save_to_disk` wrote, and datasets on the hub ("org/name", "org/name:split",
            "org/name:config:split").

    Raises `CheckpointError` where a source cannot be read or a row is malformed. The message names file and line.
    """
    for where, entry in read_entries(sources):
        yield parse_row(entry, where)


def read_entries(sources: Iterable[str | Path]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of data sources before they are checked, each after its place for error messages."""
    for source in chain.from_iterable(map(_files_of, map(str, sources))):
        yield from _read_dataset(source) if _is_dataset(source) else _read_file(Path(source))


def check_data(source: str) -> None:
    """Raise `CheckpointError` for a data source that is to be a file or a directory, and is not there."""
    if not _is_dataset(source) and not os.path.isdir(source):
        try:
            with open(source, "rb"):
                pass
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source} cannot be read: {first_line(error)}") from error


def _files_of(source: str) -> list[str]:
    """Return the .jsonl files of a directory that holds some, or the source itself."""
    try:
        files = sorted(str(file) for file in Path(source).glob("*.jsonl")) if os.path.isdir(source) else []
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {first_line(error)}") from error
    return files or [source]


def open_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file (plain, .gz or .xz) that are not blank, with their numbers from 1."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as lines:
            yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:  # ValueError: no UTF-8, NUL in a name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a data file, each after its place for error messages.

    A file holds one JSON value in each line. A `.json` file may instead hold one list, whose elements are yielded.
    """
    lines = open_lines(path)
    may_be_list = path.name.removesuffix(".gz").removesuffix(".xz").endswith(".json")
    for number, line in lines:
        if may_be_list and line.lstrip().startswith("["):
            # A JSON list may extend over all lines.
            content = line + "".join(rest for _, rest in lines)
            for row, entry in enumerate(_parse_json(content, str(path)), start=1):
                yield f"{path}:row {row}", entry
        else:
            yield f"{path}:{number}", _parse_json(line, f"{path}:{number}")
        # Only a first line can open a list; later brackets are rows.
        may_be_list = False


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON: {first_line(error)}") from error


def _is_dataset(source: str) -> bool:
    if os.path.isfile(source):  # unlike `Path`'s methods, these accept any name
        return source.endswith(".parquet")
    hub = HUB_NAME.fullmatch(source) is not None and not source.endswith(SUFFIXES)
    return hub or os.path.isdir(source.partition(":")[0])


def _read_dataset(source: str) -> Iterator[tuple[str, Any]]:
    is_file = os.path.isfile(source)
    found = "a parquet file" if is_file else "not a file"
    try:
        import datasets
    except ImportError as error:
        message = f"{source} is {found}; to read it as a Hugging Face dataset: pip install datasets"
        raise CheckpointError(message) from error
    name, _, split = source.partition(":")
    try:
        if is_file:
            split, splits = "", {"train": datasets.load_dataset("parquet", data_files=source, split="train")}
        elif Path(name).is_dir():  # which goes before the hub
            splits = datasets.load_from_disk(name)
            splits = splits if isinstance(splits, dict) else {"train": splits}
        else:
            named = HUB_NAME.fullmatch(source)
            assert named is not None, "a dataset on the hub"
            split = named["split"] or "train"
            splits = {split: datasets.load_dataset(named["name"], named["config"], split=split)}
    except Exception as error:  # it may run a script, a network and many formats
        message = f"{source} is {found}, and cannot be read as a Hugging Face dataset: {first_line(error)}"
        raise CheckpointError(message) from error
    if (split or "train") not in splits:
        raise CheckpointError(f"{source}: no split {split or 'train'}; write {name}: and one of {', '.join(splits)}")
    for row, entry in enumerate(splits[split or "train"], start=1):
        # Keys of the row itself stay, since all rows of a data set are read alike.
        yield f"{source}:row {row}", {key: conversations.drop_nulls(value) for key, value in entry.items()}


def parse_row(value: Any, where: str) -> Row:
    """Check a row; raise `CheckpointError` where it is malformed. `where` is its place for the message."""
    columns = {"prompt": value} if isinstance(value, str) else value if isinstance(value, dict) else {}
    # Datasets fill missing fields of a row with null.
    entry = {key: value for key, value in columns.items() if value is not None}
    kinds = [kind for kind in KIND_KEYS if kind in entry] or [kind for kind in PROMPT_KEYS if kind in entry][:1]
    if len(kinds) != 1 and not (not kinds and isinstance(entry.get("chosen"), list)):
        known = ", ".join((*KIND_KEYS, *PROMPT_KEYS))
        raise CheckpointError(f"{where}: a row has one of {known}; found {str(value)[:80]}")
    kind = kinds[0] if kinds else "chosen"
    media = next((key for key in conversations.MEDIA_KEYS if entry.get(key) and kind != "input_ids"), None)
    if media is not None:
        raise CheckpointError(f'{where}: a row has "{media}", and only text is read; leave such rows out')
    if kind == "prompt" and entry.get("label") is False:  # TRL's data of KTO
        raise CheckpointError(f'{where}: "label" is false, which marks an answer to avoid; leave such rows out')
    if kind == "prompt" and (other := next(filter(entry.get, ("context", "input", "instruction")), None)):
        raise CheckpointError(f'{where}: a row has "prompt" or "{other}", and not both; join them or leave one out')
    split, names = entry.get("split"), (entry.get("category"), entry.get("source"))
    if split is not None and split not in SPLITS:
        raise CheckpointError(f'{where}: "split" is one of {", ".join(SPLITS)}; found {split!r}')
    source = next((name for name in names if isinstance(name, str)), None)
    written_at: Any = entry.get("temperature")
    common: dict[str, Any] = {"split": split, "source": source}
    common["temperature"] = float(written_at) if type(written_at) in (int, float) else None
    if entry.get("tokenizer") is not None:
        common["tokenizer"] = conversations.check_string(entry["tokenizer"], where, '"tokenizer"')
    if kind == "text":
        return Row(where, text=conversations.check_string(entry["text"], where, '"text"'), **common)
    if kind == "input_ids":
        ids, mask = _parse_ids(entry["input_ids"], entry.get("loss_mask"), where)
        return Row(where, ids=ids, loss_mask=mask, **common)
    if conversations.is_conversation(columns):
        return Row(where, **conversations.parse_conversation(entry, where)._asdict(), **common)
    prompt, answer = _parse_prompt(entry, where)
    return Row(where, prompt=prompt, answer=answer, **common)


def _parse_prompt(entry: dict[str, Any], where: str) -> tuple[str, str | None]:
    """Return a prompt in plain text and its answer."""
    names = conversations.PROMPT_ANSWERS if "prompt" in entry else conversations.INSTRUCTION_ANSWERS
    name, answer = conversations.answer_of(entry, names, where)
    answer = None if answer is None else conversations.check_string(answer, where, f'"{name}"')
    if "prompt" in entry:
        prompt = conversations.check_string(entry["prompt"], where, '"prompt"')
    else:
        given, instruction = conversations.instruction_of(entry, where)
        prompt, answer = " ".join(given + instruction), None if answer is None else "\n" + answer
    if not prompt:
        raise CheckpointError(f"{where}: the prompt is empty")
    return prompt, answer


def _parse_ids(ids: Any, mask: Any, where: str) -> tuple[list[int], list[bool]]:
    are_ints = isinstance(ids, list) and set(map(type, ids)) <= {int}  # not bool, which is an int too
    if not are_ints or not 0 <= min(ids, default=0) <= max(ids, default=0) < 2**31:
        raise CheckpointError(f'{where}: "input_ids" must be a list of token ids, found {str(ids)[:80]}')
    is_mask = isinstance(mask, list) and set(map(type, mask)) <= {int, bool} and set(mask) <= {0, 1}
    if not is_mask or len(mask) != len(ids):
        raise CheckpointError(f'{where}: "loss_mask" must be a list of 0 and 1, one for each of "input_ids"')
    return ids, [bool(flag) for flag in mask]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return 16 hex digits that differ between tokenizers whose ids mean different tokens."""
    return _fingerprint(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _fingerprint(tokenizer: "PreTrainedTokenizerBase", size: int) -> str:
    # `size` keeps apart the cached values of one tokenizer before and after it grew.
    added = sorted((index, str(token)) for index, token in tokenizer.added_tokens_decoder.items())
    content = json.dumps([sorted(tokenizer.get_vocab().items()), added])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
