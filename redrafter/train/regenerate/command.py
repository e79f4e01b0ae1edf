"""Regenerate the answers of a data set with the base, to train its drafter on the base's own text.

    redrafter regenerate --model BASE --drafter DRAFTER --data chat.jsonl --output own.jsonl

Conversations are answered turn by turn; texts are continued from their beginning; with --invent, the base also
generates questions. The output stores exact token ids. A drafter affects the speed only. After a kill, the same command
resumes. With --shard, several processes share a data set, and `redrafter regenerate merge` combines their outputs.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from redrafter.app.engines import can_draft
from redrafter.app.loading import NO_DRAFT_OPTIONS, Pair
from redrafter.app.options import LoadOptions
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.data.rows import Row, fingerprint, read_rows
from redrafter.engine.tuning import target_fingerprint
from redrafter.errors import CheckpointError
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.report import versions
from redrafter.train.regenerate.answer_writer import AnswerWriter, invented_rows, select_rows
from redrafter.train.regenerate.config import RegenerateConfig, main
from redrafter.train.regenerate.journal import Journal, check_output, with_rates

# Options that affect the speed or the output file, but not the answers; a resumed run may change them.
OTHER_OPTIONS = ("model", "drafter", "device", "trust_remote_code", "output", "overwrite", "batch_size")


def regenerate(
    pair: Pair,
    rows: Iterable[Row],
    config: RegenerateConfig,
    *,
    total: int | None = None,
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Answer rows and write `config.output`, or resume an interrupted run.

    Only the options from `output` on are read from `config`. `total` is the number of rows that `select_rows` chooses,
    for progress. Returns the summary, which is also written to OUTPUT.json.

    Raises:
        ArgumentError: The output exists, or was started with other settings.
        CheckpointError: No row could be answered.
    """
    target = pair.engine.target
    # All settings that affect the answers; a run may resume with another drafter, device or batch size.
    settings = {name: value for name, value in asdict(config).items() if name not in OTHER_OPTIONS} | {
        "data_bytes": [Path(file).stat().st_size if Path(file).is_file() else None for file in config.data],
        "base": target_fingerprint(target),
        "tokenizer": fingerprint(pair.tokenizer),
        "dtype": dtype_name(target.dtype),
    }
    output = Path(str(config.output))
    check_output(output, "--output", config.overwrite)
    with Journal(output, settings) as journal:
        writer = AnswerWriter(pair, config, journal, log, total)
        writer.answer(rows)
        success = len(journal.done) - len(journal.errors)
        # Every row is accounted for.
        assert writer.input == success + len(journal.errors) + writer.skipped
        if journal.errors and not success:
            first = journal.first_error()
            journal.remove()
            raise CheckpointError(f"none of {writer.input} rows could be answered; {first['prompt']}: {first['error']}")
        counts = {
            "input": writer.input,
            "success": success,
            "errors": len(journal.errors),
            "skipped": writer.skipped,
            "ended_at_tools": journal.ended_at_tools,
            "tokens": journal.tokens,
        }
        facts = {"base": writer.base, "settings": settings, "versions": versions()}
        summary = with_rates(counts | journal.totals) | facts
        journal.finish(summary)
    return summary


def regenerate_files(config: RegenerateConfig, log: Callable[[str], object]) -> dict[str, Any]:
    """Answer the rows of the files of a command line. Returns the summary."""
    check_output(Path(str(config.output)), "--output", config.overwrite)

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
    pair = Pair.load(options, speculate=can_draft(options, NO_DRAFT_OPTIONS))
    if config.adapter is not None:
        merge_adapter(pair.engine.model, config.adapter)
    return pair


def run_checked(config: RegenerateConfig) -> int:
    """Run the command with options validated by `main`. Returns its exit code."""
    summary = regenerate_files(config, log=lambda line: print(line, file=sys.stderr, flush=True))
    if stopped := summary["ended_at_tools"]:
        print(f"{stopped} rows end before the result of a tool that the base did not call as the row does")
    print(
        f"{config.output}: {summary['success']} of {summary['input']} rows, {summary['errors']} errors, "
        f"{summary['skipped']} skipped; {summary['tokens']:,} tokens in {summary['seconds']:.0f} s, "
        f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['tokens_per_step']:.2f} tokens per step"
    )
    train = ["redrafter", "train", "--model", str(config.model), "--data", str(config.output), "--output", "DRAFTER"]
    print(f"to train a drafter on it: {shlex.join(train)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
