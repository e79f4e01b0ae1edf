"""Suites of questions by category (SPEED-Bench, Spec-Bench, MT-Bench), read as their makers' scripts prepare them.

Nothing of theirs ships with the package: a suite is a directory on this machine, with one of

    question.jsonl                     Spec-Bench, MT-Bench: {"category": "...", "turns": ["...", "..."]}
    qualitative/test.parquet, ...      SPEED-Bench by NVIDIA's prepare_data.py: the same, a folder for each split
    qualitative.jsonl, ...             SPEED-Bench for aiperf: {"category": "...", "messages": [{"role": "user", ...}]}

or several of them. The questions of several splits keep apart: the name of the split goes before their category.
A question consists of a user's turns, which the model answers one by one (`Dialogues`).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redrafter.data.prompts import RowChat
from redrafter.data.rows import Row, parse_row, read_entries
from redrafter.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUITE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
# What SPEED-Bench's rows hold in place of a prompt until its makers' script has fetched the prompt from its source.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Question:
    """A question of a suite: the turns of a user, optionally after a system message."""

    row: Row  # has the messages of the system and the user
    category: str

    @property
    def turns(self) -> list[list[dict[str, str]]]:
        """Messages of each turn: a user's, after any system messages."""
        turns: list[list[dict[str, str]]] = [[]]
        for message in self.row.messages or ():
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
        return turns[:-1]


@dataclass(frozen=True)
class Suite:
    """The questions of a suite."""

    name: str  # directory or file that they were read from
    categories: dict[str, list[Question]]  # in the order of the files, as are the questions of each

    def __str__(self) -> str:
        questions = [question for some in self.categories.values() for question in some]
        turns = sum(len(question.turns) for question in questions)
        asked = f"{len(questions)} questions in {len(self.categories)} categories, {turns} turns"
        return f"{Path(self.name).absolute().name}: {asked}, each after the model's own answers to those before it"

    def choose(self, count: int | None, seed: int) -> "Suite":
        """Return the suite with `count` questions of each category, chosen by the seed; with all where it is None."""
        chosen: dict[str, list[Question]] = {}
        for category, questions in self.categories.items():
            indices = random.Random(seed).sample(range(len(questions)), min(count or len(questions), len(questions)))
            chosen[category] = [questions[index] for index in sorted(indices)]
        return replace(self, categories=chosen)


def read_suite(name: str) -> Suite:
    """Read a suite from a directory, or from one file of it.

    Raises `ArgumentError` where there is no suite, and `CheckpointError` for a row that is no question; the message
    names file and line.
    """
    files = suite_files(name)
    splits = {file: _split_name(file) for file in files}
    several = len({*splits.values()}) > 1
    categories: dict[str, list[Question]] = {}
    for file, split in splits.items():
        for where, entry in read_entries([file]):
            question = _parse_question(entry, where)
            # Categories of several splits may have equal names.
            if several:
                question = replace(question, category=f"{split}/{question.category}")
            categories.setdefault(question.category, []).append(question)
    if not categories:
        raise ArgumentError(f"--suite {name}: {', '.join(map(str, files))} holds no question")
    return Suite(name, categories)


def suite_files(name: str) -> list[Path]:
    """Return the files of the suite in a directory, or the one that is named; raise `ArgumentError` for none."""
    root = Path(name)
    files = [root] if root.is_file() else list(_find_files(root)) if root.is_dir() else []
    if not files:
        what = f"holds no {', '.join(SUITE_SUFFIXES)} file" if root.is_dir() else "is not a directory"
        raise ArgumentError(
            f"--suite {name} {what}: give the directory with the question.jsonl of Spec-Bench or MT-Bench, or what "
            "SPEED-Bench's prepare_data.py wrote"
        )
    return files


def _find_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a suite in a folder, or where it has none, those in the folders in it."""
    entries = sorted(folder.iterdir())
    if (question := folder / "question.jsonl") in entries:
        # Makers' scripts write answers and judgements into folders next to it.
        yield question
        return
    here = [entry for entry in entries if entry.name.endswith(SUITE_SUFFIXES) and entry.is_file()]
    yield from here or (file for entry in entries if entry.is_dir() for file in _find_files(entry))


def _split_name(file: Path) -> str:
    """Return the name of a file's questions: its own, or its folder's where its own is generic."""
    stem = file.name.partition(".")[0]
    return file.absolute().parent.name if stem == "question" or stem.startswith("test") else stem


def _parse_question(entry: Any, where: str) -> Question:
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), list):  # MT-Bench as it is on the hub
        entry = {key: value for key, value in entry.items() if key != "prompt"} | {"turns": entry["prompt"]}
    row = parse_row(entry, where)
    category = entry.get("category") if isinstance(entry, dict) else None
    if not isinstance(category, str) or not category.strip():
        raise CheckpointError(f'{where}: a question has a "category", by which a suite is reported; found {category!r}')
    if row.messages is None:
        raise CheckpointError(f'{where}: a question has "turns", or "messages" of a user; for other rows: --prompts')
    roles = [message["role"] for message in row.messages]
    if not roles or roles[-1] != "user" or not {*roles} <= {"system", "user"}:
        raise CheckpointError(
            f"{where}: a question is turns of a user, since the model answers each itself; found the roles "
            f"{', '.join(roles) or 'of no turn'}"
        )
    for turn, message in enumerate(row.messages, start=1):
        if not message["content"].strip():
            raise CheckpointError(f"{where}: turn {turn} is empty")
        if message["content"].startswith(PLACEHOLDER):
            what = f"{where}: turn {turn} is a placeholder of SPEED-Bench: its prepare_data.py fetches the prompts"
            raise CheckpointError(what)
    return Question(row, category)


class Dialogues:
    """Questions that are asked turn by turn, each turn after the model's own answers to the turns before it.

    A turn whose prompt has more than `most` tokens is not asked, nor are those that follow it.

    Attributes:
        skipped: How many turns were not asked so far.
    """

    def __init__(self, questions: Sequence[Question], tokenizer: "PreTrainedTokenizerBase", most: int):
        self._tokenizer, self._most = tokenizer, most
        # For each question with turns left: itself, these turns, and the messages so far.
        self._open = [(question, question.turns, list[dict[str, str]]()) for question in questions]
        self.skipped = 0

    def next_prompts(self) -> list[list[int]]:
        """Return the token ids of the next turn's prompt of each question that has one; at the end, none.

        Raises `CheckpointError`, naming the row, where the chat template cannot render it.
        """
        asked, prompts = [], []
        for question, turns, messages in self._open:
            if not turns:
                continue
            messages += turns.pop(0)
            chat = RowChat(replace(question.row, messages=messages), self._tokenizer)
            prompt = chat.encode(chat.render(messages, add_generation_prompt=True))
            if len(prompt) > self._most:
                # Later turns contain this prompt, so they are too long as well.
                self.skipped += 1 + len(turns)
            else:
                asked.append((question, turns, messages))
                prompts.append(prompt)
        self._open = asked
        return prompts

    def answer(self, answers: Sequence[Sequence[int]]) -> None:
        """Take the token ids that the model wrote after each of the prompts that were returned last."""
        for (_, _, messages), ids in zip(self._open, answers, strict=True):
            content = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
            messages.append({"role": "assistant", "content": content})
