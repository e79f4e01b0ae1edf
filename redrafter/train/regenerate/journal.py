"""Write the journal of a run, OUTPUT.partial, from which it resumes after a kill, and its output.

The first line holds the settings; each following line is a finished row, a failed row, or the cost of a batch. Rows are
in order of completion, and are sorted by the order of the data set at the end.

`merge` combines the outputs of all shards of a run into the output of a run without shards.
"""

import heapq
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from redrafter.app.flags import format_value
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.atomic_file import check_writable, write_atomically
from redrafter.train.regenerate.config import shard_numbers

# Entries of a summary that are summed over shards.
COUNTS = ("input", "success", "errors", "skipped", "ended_at_tools", "tokens", "seconds", "steps", "emitted")


class BatchCost(TypedDict):
    """The cost of decoding a batch."""

    seconds: float
    steps: int
    emitted: int


class Record(TypedDict, total=False):
    """A line of the journal: the settings, the cost of a batch, a failed row (`error`) or an answered row.

    An answered row is also a line of the output.
    """

    settings: Mapping[str, object]
    batch: BatchCost
    row: int  # number of the row in the data set
    prompt: str  # file and line of the row
    error: str  # why the row failed
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


class Journal:
    """The journal of a run that writes `output`; a context manager that loads the records of an interrupted run.

    `settings` holds all settings that affect the answers.

    Raises:
        ArgumentError: The file cannot be written, or was started with another setting, which the message names.
        CheckpointError: The file is not a journal.
    """

    def __init__(self, output: Path, settings: Mapping[str, object]):
        self.output, self.path = output, output.with_name(output.name + ".partial")
        self.done: dict[int, int] = {}  # line offsets of finished and failed rows by row number
        self.errors: set[int] = set()  # numbers of the rows that failed
        self.ended_at_tools = 0  # number of the finished rows that end before the result of a tool
        self.tokens, self.totals = 0, BatchCost(seconds=0.0, steps=0, emitted=0)  # of all answers, and of all batches
        self._end = 0
        # A round trip through JSON turns tuples into lists, to compare with saved settings.
        self._settings: dict[str, object] = json.loads(json.dumps(settings))
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

    def add(self, records: Iterable[Record]) -> None:
        """Append records and flush them to the system, so that they survive a kill of the process."""
        for record in records:
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            self._file.write(line)
            self._note(record, self._end)
            self._end += len(line)
        self._file.flush()

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the output, with the finished rows in the order of the data set, and remove the journal."""
        write_output(self.output, self._lines(self.done.keys() - self.errors), self._lines(self.errors), summary)
        self.remove()

    def remove(self) -> None:
        """Close and remove the journal."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def first_error(self) -> Record:
        """Return the record of the first row that failed."""
        record: Record = json.loads(next(self._lines({min(self.errors)})))
        return record

    def _lines(self, rows: Set[int]) -> Iterator[bytes]:
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
                try:
                    record: Record = json.loads(line)
                except ValueError as error:
                    raise CheckpointError(
                        f"{self.path}: not JSON, so no run left it there: {line[:60]!r}; delete it"
                    ) from error
                if self._end == 0:
                    # The first line holds the settings of the run.
                    self._check(record.get("settings", {}))
                self._note(record, self._end)
                self._end += len(line)
        # Drop a line that a kill cut short.
        self._file.truncate(self._end)
        if self._end == 0:
            self.add([{"settings": self._settings}])

    def _note(self, record: Record, offset: int) -> None:
        """Update the attributes with a record at an offset of the file."""
        if "row" in record:
            self.done[record["row"]] = offset
            if "error" in record:
                self.errors.add(record["row"])
            else:
                self.tokens += sum(record["loss_mask"])
                self.ended_at_tools += record.get("finish") == "tool"
        elif "batch" in record:
            cost = record["batch"]
            self.totals["seconds"] += cost["seconds"]
            self.totals["steps"] += cost["steps"]
            self.totals["emitted"] += cost["emitted"]

    def _check(self, saved: Mapping[str, object]) -> None:
        for name, setting in self._settings.items():
            if saved.get(name) != setting:
                values = (tuple(value) if isinstance(value, list) else value for value in (saved.get(name), setting))
                old, new = map(format_value, values)
                raise ArgumentError(
                    f"{self.path} was started with {name.replace('_', '-')} {old}, now it is {new}: continue with the "
                    "same, or delete that file to start again"
                )


def check_output(output: Path, flag: str, overwrite: bool) -> None:
    """Raise `ArgumentError` if the file of `flag` cannot be written, or exists and must not be replaced."""
    check_writable(output, flag)
    if output.exists() and not overwrite:
        raise ArgumentError(f"{flag} {output} is there already; name another, or pass --overwrite")


def write_output(output: Path, lines: Iterable[bytes], failed: Iterable[bytes], summary: Mapping[str, object]) -> None:
    """Write the failed rows, the summary and then `output`, which appears atomically.

    Raises `ArgumentError` if a file cannot be written.
    """
    errors, failures = output.with_name(output.name + ".errors.jsonl"), b"".join(failed)
    if failures:
        write_atomically(errors, failures)
    else:
        errors.unlink(missing_ok=True)
    write_atomically(output.with_name(output.name + ".json"), json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    # The output appears last: its existence means that the run has finished.
    part = output.with_name(output.name + ".part")
    try:
        with open(part, "wb") as file:
            file.writelines(lines)
            file.flush()
            # Before the rename, or a crash of the system could leave an empty output.
            os.fsync(file.fileno())
        part.replace(output)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ArgumentError(f"cannot write {output}: {error.strerror}") from error


@dataclass(frozen=True)
class _Shard:
    """The output of one shard."""

    path: Path  # file of its rows
    summary: dict[str, Any]  # content of PATH.json

    @classmethod
    def load(cls, path: Path) -> "_Shard":
        """Load the summary of a finished shard. Raises `CheckpointError` for an unfinished or incomplete one."""
        if not path.is_file():
            unfinished = path.with_name(path.name + ".partial").exists()
            reason = "it has not finished: run its command again" if unfinished else "no such file"
            raise CheckpointError(f"shard {path}: {reason}")
        try:
            shard = cls(path, json.loads(path.with_name(path.name + ".json").read_text(encoding="utf-8")))
            shard_numbers(shard.settings["shard"])
            counts = {name: shard.summary[name] for name in COUNTS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"shard {path}: {path.name}.json is not a summary of redrafter regenerate: {first_line(error)}"
            ) from error
        # An output may have been truncated or edited since.
        for suffix, count in (("", counts["success"]), (".errors.jsonl", counts["errors"])):
            if sum(1 for _ in shard.rows(suffix)) != count:
                raise CheckpointError(
                    f"shard {path}{suffix} does not hold the {count} rows that it was finished with: run its command "
                    "again with --overwrite"
                )
        return shard

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that affect the answers, and the shard."""
        settings: dict[str, Any] = self.summary["settings"]
        return settings

    def rows(self, suffix: str = "") -> Iterator[tuple[int, bytes]]:
        """Yield the number and the line of each row, in the order of the data set.

        `suffix` is appended to the file's name: empty for answers, `.errors.jsonl` for failed rows.
        """
        file = self.path.with_name(self.path.name + suffix)
        if suffix and not file.exists():  # no row failed
            return
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    number = json.loads(line)["row"]
                    if not line.endswith(b"\n"):
                        raise ValueError("the file was cut short")
                except (ValueError, KeyError, TypeError) as error:
                    raise CheckpointError(f"shard {file} holds a line that is no row: {line[:60]!r}") from error
                yield number, line


def merge(output: Path, paths: Sequence[Path], *, overwrite: bool = False) -> dict[str, Any]:
    """Write the rows of all shards of a run, given in any order, to `output` in the order of the data set.

    Also writes the failed rows and the summary, which is returned. `overwrite` replaces an existing file.

    Raises:
        ArgumentError: The output cannot be written, or a shard belongs to another run, is missing or is given twice.
        CheckpointError: A shard is unfinished or incomplete.
    """
    check_output(output, "OUTPUT", overwrite)
    shards = [_Shard.load(path) for path in paths]
    _check_one_run(shards)
    total = {name: sum(shard.summary[name] for shard in shards) for name in COUNTS}
    summary = shards[0].summary | with_rates(total) | {"settings": shards[0].settings | {"shard": "0/1"}}
    write_output(output, _merge_rows(shards), _merge_rows(shards, ".errors.jsonl"), summary)
    return summary


def _merge_rows(shards: Sequence[_Shard], suffix: str = "") -> Iterator[bytes]:
    return (line for _, line in heapq.merge(*(shard.rows(suffix) for shard in shards)))


def _check_one_run(shards: Sequence[_Shard]) -> None:
    first, count = shards[0], shard_numbers(shards[0].settings["shard"])[1]
    by_index: dict[int, _Shard] = {}
    for shard in shards:
        index, shard_count = shard_numbers(shard.settings["shard"])
        for name in sorted(first.settings.keys() | shard.settings.keys()):
            one, other = first.settings.get(name), shard.settings.get(name)
            if one != other and (name != "shard" or shard_count != count):
                option = name.replace("_", "-")
                raise ArgumentError(
                    f"{first.path} and {shard.path} are not of one run: {option} was {one!r} and {other!r}"
                )
        if index in by_index:
            raise ArgumentError(f"{by_index[index].path} and {shard.path} are both shard {index}/{count}: give it once")
        by_index[index] = shard
    missing = [f"{index}/{count}" for index in range(count) if index not in by_index]
    if missing:
        raise ArgumentError(f"{len(missing)} of {count} shards missing: {', '.join(missing[:8])}; give all of them")


def with_rates(counts: dict[str, Any]) -> dict[str, Any]:
    """Add rates to the `COUNTS` of a summary: tokens per second of the summed time of all shards, and per step."""
    return counts | {
        "seconds": round(counts["seconds"], 3),
        "tokens_per_second": round(counts["tokens"] / max(counts["seconds"], 1e-9), 3),
        "tokens_per_step": round(counts["emitted"] / max(counts["steps"], 1), 3),
    }


def merge_command(argv: Sequence[str]) -> int:
    """Run `redrafter regenerate merge`. Returns its exit code."""
    parser = Parser(
        prog="redrafter regenerate merge",
        description="Combine the outputs of all shards of a run into the output of a run without shards.",
    )
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="file of JSON lines to write")
    parser.add_argument("shards", metavar="SHARD", type=Path, nargs="+", help="output of each shard, in any order")
    parser.add_argument("--overwrite", action="store_true", help="replace the file OUTPUT")
    arguments = parser.parse_args(argv)
    summary = merge(arguments.output, arguments.shards, overwrite=arguments.overwrite)
    print(
        f"{arguments.output}: {summary['success']} of {summary['input']} rows of {len(arguments.shards)} shards, "
        f"{summary['errors']} errors, {summary['skipped']} skipped; {summary['tokens']:,} tokens"
    )
    return 0
