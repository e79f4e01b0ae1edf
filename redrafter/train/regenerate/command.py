"""Let a base answer the prompts of a data set itself, to train its drafter on the base's own text.

    redrafter regenerate --model BASE --drafter DRAFTER --data chat.jsonl --output own.jsonl

Conversations are answered turn by turn; texts are continued from their beginning. The exact ids are kept. A drafter
only makes it faster. Killed at any moment, the same command goes on; several processes share a data set with --shard,
and `redrafter regenerate merge` puts their outputs together.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.app.loading import Pair, check_options
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.program import run_command
from redrafter.checkpoints.adapters import merge_adapter
from redrafter.checkpoints.merged import holds_drafter
from redrafter.checkpoints.models import load_model
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.data.rows import Row, fingerprint, read_rows
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.engine import Engine
from redrafter.engine.tuning import target_fingerprint
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.atomic_file import check_writable
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.report import versions
from redrafter.model.target import Target
from redrafter.train.regenerate.answer_writer import AnswerWriter, select_rows
from redrafter.train.regenerate.config import RegenerateConfig, parse
from redrafter.train.regenerate.journal import Journal, merge_command

# Options that change how fast rows are answered or where they are written, and not the answers.
OPTIONS_BESIDE_ANSWERS = ("model", "drafter", "device", "trust_remote_code", "output", "overwrite", "batch_size")


def regenerate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    config: RegenerateConfig,
    *,
    total: int | None = None,
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Answer rows and write `config.output`, or go on where an earlier run stopped.

    Of `config` only the options from `output` on are read. `total` is the number of rows that `select_rows` chooses,
    for progress.

    Returns:
        The summary, which is written to OUTPUT.json too.

    Raises:
        ArgumentError: The output exists, or was begun with other settings.
        CheckpointError: No row could be answered.
    """
    settings = _settings(engine, tokenizer, config)
    with Journal(check_output(config), settings) as journal:
        writer = AnswerWriter(engine, tokenizer, config, journal, log, total)
        writer.answer(rows)
        success = len(journal.done) - len(journal.errors)
        assert writer.input == success + len(journal.errors) + writer.skipped
        if journal.errors and not success:
            first = journal.first_error()
            journal.remove()
            raise CheckpointError(f"none of {writer.input} rows could be answered; {first['prompt']}: {first['error']}")
        seconds = journal.totals["seconds"]
        summary = {
            "input": writer.input,
            "success": success,
            "errors": len(journal.errors),
            "skipped": writer.skipped,
            "tokens": journal.tokens,
            "seconds": round(seconds, 3),
            "steps": journal.totals["steps"],
            "emitted": journal.totals["emitted"],
            "tokens_per_second": round(journal.tokens / max(seconds, 1e-9), 3),
            "tokens_per_step": round(journal.totals["emitted"] / max(journal.totals["steps"], 1), 3),
            "base": writer.base,
            "settings": settings,
            "versions": versions(),
        }
        journal.finish(summary)
    return summary


def _settings(engine: Engine, tokenizer: PreTrainedTokenizerBase, config: RegenerateConfig) -> dict[str, Any]:
    """Return all that the answers depend on; another drafter, device or batch size may finish a run."""
    settings = {name: value for name, value in asdict(config).items() if name not in OPTIONS_BESIDE_ANSWERS}
    sizes = [Path(file).stat().st_size if Path(file).is_file() else None for file in config.data]
    return settings | {
        "data_bytes": sizes,
        "base": target_fingerprint(engine.target),
        "tokenizer": fingerprint(tokenizer),
        "dtype": dtype_name(engine.target.dtype),
    }


def check_output(config: RegenerateConfig) -> Path:
    """Return the file to write. Raises `ArgumentError` if it cannot be written, or exists without `--overwrite`."""
    assert config.output is not None
    output = Path(config.output)
    check_writable(output, "--output")
    if output.exists() and not config.overwrite:
        raise ArgumentError(f"--output {output} is there already; name another, or pass --overwrite")
    return output


def run(config: RegenerateConfig, log: Callable[[str], object]) -> dict[str, Any]:
    """Answer the rows of the files that a command line names. Returns the summary."""
    check_output(config)
    # A bad row is found here, before any is answered.
    chosen = [chosen for *_, chosen in select_rows(read_rows(config.data), config)]
    if not any(chosen):
        raise CheckpointError(f"{', '.join(config.data)}: no row for --split {config.split} --shard {config.shard}")
    engine, tokenizer = load(config)
    return regenerate(engine, tokenizer, read_rows(config.data), config, total=len(chosen), log=log)


def load(config: RegenerateConfig) -> tuple[Engine, PreTrainedTokenizerBase]:
    """Load the base, with its adapter and its drafter if it has such, and its tokenizer."""
    options = LoadOptions(
        model=config.model,
        drafter=config.drafter,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
    )
    name, options, _ = check_options(options, DraftOptions())
    engine, tokenizer = _load_base(name, options)
    if config.adapter is not None:
        merge_adapter(engine.model, config.adapter)
    return engine, tokenizer


def _load_base(name: str, options: LoadOptions) -> tuple[Engine, PreTrainedTokenizerBase]:
    if options.drafter is not None or holds_drafter(name):
        pair = Pair.load(options)
        return pair.engine, pair.tokenizer
    trust = options.trust_remote_code
    tokenizer = load_tokenizer(name, trust_remote_code=trust)
    model = load_model(name, dtype=options.dtype, device=options.device, trust_remote_code=trust)
    return Engine(Target(model), PlainProposer()), tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter regenerate`. Returns its exit code."""

    def command() -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["merge"]:
            return merge_command(words[1:])
        config = parse(words)
        summary = run(config, log=lambda line: print(line, file=sys.stderr, flush=True))
        print(
            f"{config.output}: {summary['success']} of {summary['input']} rows, {summary['errors']} errors, "
            f"{summary['skipped']} skipped; {summary['tokens']:,} tokens in {summary['seconds']:.0f} s, "
            f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['tokens_per_step']:.2f} tokens per step"
        )
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
