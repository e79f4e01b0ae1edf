"""Options of `redrafter regenerate`, each with its default and its help text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redrafter.app.config_file import ConfigParser, command_parser
from redrafter.app.flags import flag, floats, read_options
from redrafter.app.options import TemplateOptions
from redrafter.app.paths import check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.errors import ArgumentError
from redrafter.options import between, check_values, dtype_word, option
from redrafter.train.regenerate.answer_file import check_answer_file


@dataclass(frozen=True)
class RegenerateConfig(TemplateOptions):
    """Regenerate the answers of a data set with a model, to train its drafter on them.

    A run skips the rows that its output holds.

    Attributes:
        model: base model: a hub id, a directory or a GGUF file
        drafter: drafter of the base, which makes it faster and changes no token
        adapter: LoRA adapter that the base has: a directory that PEFT wrote
        data: rows to answer: the files that `redrafter train` reads
        device: cpu, cuda, cuda:1, ... (default: the GPU, where there is one)
        dtype: dtype of the base; auto: as saved
        trust_remote_code: run model code that comes with the base
        output: file of JSON lines to write
        overwrite: replace the file that --output names; else a run skips the rows that it holds
        invent: also answer N questions that the base invents: it samples each one after the start of a user turn of its
            chat template (Magpie, arXiv 2406.08464)
        split: answer the rows of this split
        limit: answer the first N rows of the split only (default: all)
        shard: answer rows I, I+N, I+2N, ... only, I from 0 to N - 1; each shard needs a separate --output, and cat
            combines them
        minutes: minutes to answer for; then the rows in progress are dropped, and the same command continues
        batch_size: rows decoded at once; halved when memory is short
        max_new_tokens: maximum number of tokens of an answer
        max_input_len: maximum number of prompt tokens (default: the base's context)
        temperatures: temperatures; each row is answered at one of them, chosen by the seed; 0 is greedy
        top_k: sample only from the k likeliest tokens, unless greedy
        top_p: sample only from the likeliest tokens with this total probability, unless greedy
        seed: seed, from which each row's seed is derived together with its number
    """

    # `redrafter.train.regenerate.command.regenerate` reads only the fields from `output` on, since its caller
    # provides the engine and the rows.
    model: str | None = option(None, required=True, names="model")
    drafter: str | None = option(None, names="drafter")
    adapter: str | None = option(None, names="adapter")
    data: tuple[str, ...] = option((), names="data")
    device: str | None = None
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16", "float16"), type=dtype_word)
    trust_remote_code: bool = False

    output: str | None = option(None, required=True, metavar="FILE")
    overwrite: bool = False
    invent: int = option(0, check=between(0, math.inf))
    split: str = option("train", choices=("train", "val", "test"))
    limit: int | None = option(None, check=between(1, math.inf))
    shard: str = option("0/1", metavar="I/N")
    minutes: float | None = option(None, check=between(0, math.inf))
    batch_size: int = option(64, check=between(1, math.inf))
    max_new_tokens: int = option(512, check=between(1, math.inf))
    max_input_len: int | None = option(None, check=between(1, math.inf))
    temperatures: tuple[float, ...] = option((0.0, 0.7, 1.0), type=floats)
    top_k: int | None = None
    top_p: float | None = None
    seed: int = option(0, check=between(0, math.inf))

    def __post_init__(self) -> None:
        check_values(self, flag)
        if not self.temperatures or not all(0 <= value < math.inf for value in self.temperatures):
            raise ArgumentError(f"--temperatures must be 0 (greedy) or more, got {self.temperatures}")
        if (self.top_k is not None or self.top_p is not None) and not any(self.temperatures):
            raise ArgumentError("--top-k and --top-p are for sampling: give --temperatures above 0 too")
        index, count = shard_numbers(self.shard)
        if not 0 <= index < count:
            raise ArgumentError(f"--shard must be I/N with I from 0 to N - 1, such as 0/4, got {self.shard!r}")


def shard_numbers(shard: str) -> tuple[int, int]:
    """Parse a shard such as `0/4` as index and count; returns zeros for an invalid one."""
    index, _, count = shard.partition("/")
    return (int(index), int(count)) if index.isdecimal() and count.isdecimal() else (0, 0)


def build_parser() -> ConfigParser:
    """Return the parser of the command."""
    return command_parser("redrafter regenerate", (RegenerateConfig, "answering", ()))


def parse(argv: Sequence[str] | None) -> RegenerateConfig:
    """Parse the arguments of the command; None parses `sys.argv[1:]`."""
    config = read_options(RegenerateConfig, build_parser().parse_args(argv))
    if not config.data and not config.invent:
        raise ArgumentError("nothing to answer: give --data FILE, --invent N, or both")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter regenerate`. Returns its exit code."""

    def command() -> int:
        config = parse(argv)
        check_paths(config)
        # Before torch is imported and a model is loaded.
        check_answer_file(Path(str(config.output)), overwrite=config.overwrite)
        return int(import_libraries("redrafter.train.regenerate.command").run_checked(config))

    return run_command(command)
