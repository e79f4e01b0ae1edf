"""Regenerate the answers of a data set with the base, to train its drafter on the base's own text.

    redrafter regenerate --model BASE --drafter DRAFTER --data chat.jsonl --output own.jsonl

Conversations are answered turn by turn; texts are continued from their beginning; with --invent, the base also
generates questions. The output stores exact token ids. A drafter affects the speed only. A run skips the rows that its
output holds, so the same command resumes after a kill. With --shard, several processes share a data set.
"""

import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.data.rows import Row, read_rows
from redrafter.errors import CheckpointError
from redrafter.train.config import Log
from redrafter.train.regenerate.answer_file import AnswerFile
from redrafter.train.regenerate.answer_writer import AnswerWriter, Summary, invented_rows, select_rows
from redrafter.train.regenerate.config import RegenerateConfig, main


def regenerate(
    pair: Pair, rows: Iterable[Row], config: RegenerateConfig, *, total: int | None = None, log: Log = print
) -> Summary:
    """Append the answers of the rows to `config.output`, but for those that it holds.

    Only the options from `output` on are read from `config`. `total` is the number of rows that `select_rows` chooses,
    for progress.

    Raises:
        ArgumentError: The output holds other rows.
        CheckpointError: No row could be answered.
    """
    with AnswerFile(Path(str(config.output)), overwrite=config.overwrite) as file:
        writer = AnswerWriter(pair, config, file, log, total)
        writer.answer(rows)
    summary = writer.summary
    assert summary.done == summary.input, "every row is accounted for"
    if summary.errors and not summary.found + summary.answered:
        raise CheckpointError(f"none of {summary.input} rows could be answered; {writer.first_error}")
    return summary


def regenerate_files(config: RegenerateConfig, log: Log) -> Summary:
    """Answer the rows of the files of a command line."""

    def rows() -> Iterator[Row]:
        return chain(read_rows(config.data), invented_rows(config.invent))

    # Read all rows once first, so that an invalid row is reported before any is answered.
    chosen = [chosen for *_, chosen in select_rows(rows(), config)]
    if not any(chosen):
        sources = ", ".join((*config.data, *(["--invent"] if config.invent else [])))
        raise CheckpointError(f"{sources}: no row for --split {config.split} --shard {config.shard}")
    return regenerate(load(config), rows(), config, total=len(chosen), log=log)


def load(config: RegenerateConfig) -> Pair:
    """Load the base and its tokenizer, and its adapter and drafter, if any."""
    names = ("model", "drafter", "dtype", "device", "trust_remote_code", "chat_template", "chat_template_kwargs")
    options = LoadOptions(**{name: vars(config)[name] for name in names})
    pair = Pair.load(options)
    if config.adapter is not None:
        merge_adapter(pair.engine.model, config.adapter)
    return pair


def run_checked(config: RegenerateConfig) -> int:
    """Run the command with options validated by `main`. Returns its exit code."""
    summary = regenerate_files(config, log=lambda line: print(line, file=sys.stderr, flush=True))
    if summary.ended_at_tools:
        print(f"{summary.ended_at_tools} rows end before the result of a tool that the base called otherwise")
    print(
        f"{config.output}: {summary.found + summary.answered} of {summary.input} rows, {summary.errors} errors, "
        f"{summary.skipped} skipped; {summary.tokens:,} tokens in {summary.seconds:.0f} s, "
        f"{summary.tokens / max(summary.seconds, 1e-9):,.0f} tokens/s, "
        f"{summary.emitted / max(summary.steps, 1):.2f} tokens per step"
    )
    train = ["redrafter", "train", "--model", str(config.model), "--data", str(config.output), "--output", "DRAFTER"]
    print(f"to train a drafter on it: {shlex.join(train)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
