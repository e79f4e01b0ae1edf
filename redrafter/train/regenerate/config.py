"""Every option of `redrafter regenerate`, each with its default and its help text, once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter.app.config_file import ConfigParser
from redrafter.app.flags import add_options, flag, floats, option, read_options
from redrafter.errors import ArgumentError

__all__ = ["RegenerateConfig", "parse"]


@dataclass(frozen=True)
class RegenerateConfig:
    """Which base answers what, and how. The command line is made from these fields.

    `regenerate` reads only those from `output` on; a caller has its engine and rows already.
    """

    model: str | None = option(None, "base model: a hub id or a directory", required=True)
    drafter: str | None = option(None, "its drafter, which makes it faster and changes no token", path=True)
    data: tuple[str, ...] = option((), "rows to answer: the files that `redrafter train` reads", required=True)
    device: str | None = option(None, "cpu, cuda, cuda:1, ... (default: the GPU, where there is one)")
    dtype: str = option("auto", "number format", choices=("auto", "float32", "bfloat16", "float16"))
    trust_remote_code: bool = option(False, "run model code that comes with the base")

    output: str | None = option(None, "file of JSON lines to write", required=True, metavar="FILE")
    overwrite: bool = option(False, "replace the file that --output names")
    split: str = option("train", "answer the rows of this split", choices=("train", "val", "test"))
    limit: int | None = option(None, "of them, the first N")
    shard: str = option("0/1", "answer rows I, I+N, I+2N, ...; each shard needs an --output of its own", metavar="I/N")
    batch_size: int = option(64, "rows decoded at once; halved whenever memory is short")
    max_new_tokens: int = option(512, "most tokens of an answer")
    max_input_len: int | None = option(None, "longest prompt, in tokens; the base's context when not given")
    temperatures: tuple[float, ...] = option(
        (0.0, 0.7, 1.0),
        "each row is written at one of these, drawn by seed; 0 is greedy",
        type=floats,
        metavar="X,...",
    )
    top_k: int | None = option(None, "where not greedy, sample from the k likeliest tokens")
    top_p: float | None = option(None, "where not greedy, sample from the likeliest tokens that hold this probability")
    seed: int = option(0, "a row's own seed comes from this one and the row's number")

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size", "max_new_tokens", "max_input_len"):
            if not (getattr(self, name) is None or getattr(self, name) > 0):
                raise ArgumentError(f"{flag(name)} must be positive, got {getattr(self, name)}")
        if self.seed < 0:
            raise ArgumentError(f"--seed must not be negative, got {self.seed}")
        if not self.temperatures or not all(0 <= value < math.inf for value in self.temperatures):
            raise ArgumentError(f"--temperatures must be 0 (greedy) or more, got {self.temperatures}")
        if (self.top_k is not None or self.top_p is not None) and not any(self.temperatures):
            raise ArgumentError("--top-k and --top-p are for sampling: give --temperatures above 0 too")
        index, count = self.part
        if not 0 <= index < count:
            raise ArgumentError(f"--shard must be I/N with I from 0 to N - 1, such as 0/4, got {self.shard!r}")

    @property
    def part(self) -> tuple[int, int]:
        """The numbers of `shard`."""
        index, _, count = self.shard.partition("/")
        return (int(index), int(count)) if index.isdecimal() and count.isdecimal() else (0, 0)


def parse(argv: Sequence[str] | None) -> RegenerateConfig:
    """The config that a command line asks for."""
    parser = ConfigParser(
        prog="redrafter regenerate",
        description="Let a model answer the prompts of a data set itself, to train its drafter on what it writes.",
        options=(RegenerateConfig,),
    )
    add_options(parser, RegenerateConfig, "answering")
    return read_options(RegenerateConfig, parser.parse_args(argv))
