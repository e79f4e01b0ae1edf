"""The output of a run: a line of JSON for each answered row, in the order of completion, from which a run resumes."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable

IDENTITY = ("prompt", "base", "tokenizer", "seed", "temperature")  # entries that a resumed run would write again

BEGINNING = b'{"row": '  # of each line


class Answer(TypedDict, total=False):
    """An answered row."""

    row: int  # number of the row in the data set
    prompt: str  # file and line of the row
    source: str | None
    split: str
    base: str
    tokenizer: str
    seed: int
    temperature: float
    finish: str  # `eos`, `length` or `tool`
    input_ids: list[int]
    loss_mask: list[int]  # 1 for ids that the base generated
    shown: str  # decoded `input_ids`


class AnswerFile:
    """A file of answered rows; a context manager that reads the rows that are there and appends others.

    Raises `ArgumentError` if the file cannot be written, or holds another line than answered rows.

    Attributes:
        found: The identity of each row that the file held, by number.
    """

    def __init__(self, path: Path, *, overwrite: bool = False):
        self.path, self.found = path, dict[int, tuple[Any, ...]]()
        end = 0
        try:
            for line, answer in _read_answers(path) if path.exists() and not overwrite else ():
                self.found[answer["row"]] = _identity(answer)
                end += len(line)
            self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
            self._file.truncate(end)  # drops a last line that a kill cut short
        except OSError as error:
            raise ArgumentError(f"cannot write {path} (--output): {error.strerror}") from error

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self.path.stat().st_size:  # no row could be answered
            self.path.unlink()

    def holds(self, answer: Answer) -> bool:
        """Return whether the file held a row, given by `row` and the entries of `IDENTITY`.

        Raises `ArgumentError` if it held another row of this number, or one that another command answered.
        """
        found = self.found.get(answer["row"])
        for name, old, new in zip(IDENTITY, found or (), _identity(answer), strict=False):
            if old != new:
                raise ArgumentError(
                    f"{self.path} holds row {answer['row']} with {name} {old}, and this command would write {new}: "
                    "continue with the same, name another --output, or pass --overwrite"
                )
        return found is not None

    def add(self, answers: Iterable[Answer]) -> None:
        """Append rows and flush them to the system, so that they survive a kill of the process."""
        self._file.writelines(json.dumps(answer, ensure_ascii=False).encode() + b"\n" for answer in answers)
        self._file.flush()


def check_answer_file(path: Path, *, overwrite: bool) -> None:
    """Raise `ArgumentError` if rows cannot be appended to a file, by its first line only."""
    check_writable(path, "--output")
    if path.is_file() and not overwrite:
        next(_read_answers(path), None)


def _read_answers(path: Path) -> Iterator[tuple[bytes, Answer]]:
    """Yield the lines of a file with their answered rows, but for a last line that was cut short."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                answer: Answer = json.loads(line)
                _identity(answer)
                complete = line.endswith(b"\n") and type(answer["row"]) is int
            except (ValueError, KeyError, TypeError):
                complete = False
            if complete:
                yield line, answer
            elif line.endswith(b"\n") or not line.startswith(BEGINNING):
                raise ArgumentError(
                    f"{path}:{number} is no row of redrafter regenerate: name another --output, or pass --overwrite"
                )


def _identity(answer: Answer) -> tuple[Any, ...]:
    prompt, *others = (answer[name] for name in IDENTITY)  # type: ignore[literal-required]
    return Path(prompt).name, *others  # the data may be in another folder
