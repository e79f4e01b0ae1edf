"""The journal of a run, OUTPUT.partial, from which the same run goes on after a kill at any moment.

Its first line holds the settings; each line after it is a finished row, a failed row, or the cost of a batch. Rows
stand in the order in which they were finished, and are put in the order of the data set at the end.
"""

import json
import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from redrafter.app.flags import format_value
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.atomic_file import write_atomically

__all__ = ["Journal", "write_rows"]


class Journal:
    """Journal of a run that writes `output`. Use it in `with`, which reads what an earlier run left.

    Args:
        output: File that the run is to write.
        settings: All that the answers depend on.

    Attributes:
        done: Offset of the line of each finished or failed row, by the row's number.
        errors: Numbers of the rows that failed.
        tokens: Tokens of all answers.
        totals: Seconds, steps and emitted tokens of all batches.

    Raises:
        ArgumentError: The file cannot be written, or was begun with another setting, which the message names.
        CheckpointError: The file is not a journal.
    """

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.path = output, output.with_name(output.name + ".partial")
        self.done: dict[int, int] = {}
        self.errors: set[int] = set()
        self.tokens, self.totals = 0, {"seconds": 0.0, "steps": 0, "emitted": 0}
        self._end = 0
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        try:
            self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise ArgumentError(f"cannot write {self.path} (--output): {error.strerror}") from error

    def __enter__(self) -> "Journal":
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records and flush them to the system, where they survive a kill of the process."""
        for record in records:
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            self._file.write(line)
            self._note(record, self._end)
            self._end += len(line)
        self._file.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the finished rows in their order to `output`, and the failed rows and the summary beside it.

        `output` appears last. The journal is removed.
        """
        beside = {name: self.output.with_name(self.output.name + name) for name in (".errors.jsonl", ".json")}
        if self.errors:
            write_atomically(beside[".errors.jsonl"], b"".join(self._lines(self.errors)).decode())
        else:
            beside[".errors.jsonl"].unlink(missing_ok=True)
        write_atomically(beside[".json"], json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        write_rows(self.output, self._lines(self.done.keys() - self.errors))
        self.remove()

    def remove(self) -> None:
        """Close and remove the journal."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def first_error(self) -> dict[str, Any]:
        """Return the record of the first row that failed."""
        record: dict[str, Any] = json.loads(next(self._lines({min(self.errors)})))
        return record

    def _lines(self, rows: Set[int]) -> Iterator[bytes]:
        """Yield the lines of some rows, in the order of the data set."""
        with open(self.path, "rb") as lines:
            for row in sorted(rows):
                lines.seek(self.done[row])
                yield lines.readline()

    def _resume(self) -> None:
        """Read the lines of an earlier run; a last line that was cut short is dropped."""
        with open(self.path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                record = self._read(line)
                if self._end == 0:
                    self._check(record.get("settings", {}))
                self._note(record, self._end)
                self._end += len(line)
        self._file.truncate(self._end)
        if self._end == 0:
            self.add([{"settings": self._settings}])

    def _read(self, line: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: not JSON, so no run left it there: {line[:60]!r}; delete it"
            ) from error
        return record

    def _note(self, record: dict[str, Any], offset: int) -> None:
        """Bring the attributes up to date with a record at an offset of the file."""
        if "row" in record:
            self.done[record["row"]] = offset
            if "error" in record:
                self.errors.add(record["row"])
            else:
                self.tokens += sum(record["loss_mask"])
        elif "batch" in record:
            for name in self.totals:
                self.totals[name] += record["batch"][name]

    def _check(self, saved: dict[str, Any]) -> None:
        """Raise `ArgumentError` if the settings of the file are not those of this run."""
        for name, setting in self._settings.items():
            if saved.get(name) != setting:
                option, old = name.replace("_", "-"), saved.get(name)
                raise ArgumentError(
                    f"{self.path} was begun with {option} {_as_typed(old)}, now it is {_as_typed(setting)}: go on "
                    "with the same, or delete that file to begin anew"
                )


def write_rows(output: Path, lines: Iterable[bytes]) -> None:
    """Write lines such that `output` appears once it is whole. Raises `ArgumentError` if it cannot be written."""
    part = output.with_name(output.name + ".part")
    try:
        with open(part, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ArgumentError(f"cannot write {output}: {error.strerror}") from error


def _as_typed(value: Any) -> str:
    """Format a setting as one types it."""
    return format_value(tuple(value) if isinstance(value, list) else value)
