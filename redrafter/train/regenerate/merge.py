"""Put the outputs of all shards of a run together, as one run without shards would have written them.

redrafter regenerate merge own.jsonl own.0.jsonl own.1.jsonl own.2.jsonl own.3.jsonl
"""

import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.atomic_file import check_writable, write_atomically
from redrafter.train.regenerate.config import shard_numbers
from redrafter.train.regenerate.journal import write_rows

__all__ = ["main", "merge"]

COUNTS = ("input", "success", "errors", "skipped", "tokens", "seconds", "steps", "emitted")  # added up over the shards


@dataclass(frozen=True)
class _Shard:
    """The output of one shard.

    Attributes:
        path: File of its rows.
        summary: What it wrote to PATH.json.
    """

    path: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "_Shard":
        """Read the summary of a finished shard. Raises `CheckpointError` for one that is not finished or not whole."""
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
                f"shard {path}: {path.name}.json beside it is no summary of redrafter regenerate: {first_line(error)}"
            ) from error
        for suffix, count in (("", counts["success"]), (".errors.jsonl", counts["errors"])):
            if sum(1 for _ in shard.rows(suffix)) != count:
                raise CheckpointError(
                    f"shard {path}{suffix} does not hold the {count} rows that it was finished with: run its command "
                    "again with --overwrite"
                )
        return shard

    @property
    def settings(self) -> dict[str, Any]:
        """All that the answers depend on, and the shard."""
        settings: dict[str, Any] = self.summary["settings"]
        return settings

    def rows(self, suffix: str = "") -> Iterator[tuple[int, bytes]]:
        """Yield the number and the line of each row, in the order of the data set.

        Args:
            suffix: End of the file's name: nothing for the answers, `.errors.jsonl` for the rows that failed.
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
    """Write the rows of all shards of a run to `output`, in the order of the data set.

    Args:
        output: File to write. The rows that failed and the summary are written beside it.
        paths: Outputs of the shards, in any order.
        overwrite: Replace a file that is there already.

    Returns:
        The summary.

    Raises:
        ArgumentError: The output cannot be written, or a shard is of another run, missing or given twice.
        CheckpointError: A shard has not finished or is not whole.
    """
    check_writable(output, "OUTPUT")
    if output.exists() and not overwrite:
        raise ArgumentError(f"{output} is there already; name another, or pass --overwrite")
    shards = [_Shard.read(path) for path in paths]
    _check_one_run(shards)
    failed = b"".join(_merge_rows(shards, ".errors.jsonl"))
    beside = {name: output.with_name(output.name + name) for name in (".errors.jsonl", ".json")}
    if failed:
        write_atomically(beside[".errors.jsonl"], failed)
    else:
        beside[".errors.jsonl"].unlink(missing_ok=True)
    summary = _summarize(shards)
    write_atomically(beside[".json"], json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_rows(output, _merge_rows(shards))
    return summary


def _merge_rows(shards: Sequence[_Shard], suffix: str = "") -> Iterator[bytes]:
    """Yield the lines of all shards in the order of the data set."""
    with ExitStack() as stack:
        rows = [shard.rows(suffix) for shard in shards]
        for iterator in rows:
            stack.callback(iterator.close)  # type: ignore[attr-defined]
        yield from (line for _, line in heapq.merge(*rows))


def _check_one_run(shards: Sequence[_Shard]) -> None:
    """Raise `ArgumentError` unless the shards are all of one run's, each once."""
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


def _summarize(shards: Sequence[_Shard]) -> dict[str, Any]:
    """Return the summary of the whole run; its seconds are those of all shards, one after another."""
    total = {name: sum(shard.summary[name] for shard in shards) for name in COUNTS}
    return shards[0].summary | {
        **total,
        "seconds": round(total["seconds"], 3),
        "tokens_per_second": round(total["tokens"] / max(total["seconds"], 1e-9), 3),
        "tokens_per_step": round(total["emitted"] / max(total["steps"], 1), 3),
        "settings": shards[0].settings | {"shard": "0/1"},
    }


def main(argv: Sequence[str]) -> int:
    """Run `redrafter regenerate merge`. Returns its exit code."""
    parser = Parser(
        prog="redrafter regenerate merge",
        description="Put the outputs of all shards of a run together, as one run without shards would have written "
        "them.",
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
