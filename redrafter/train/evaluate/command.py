"""What a drafter is worth, for many shapes of tree at once.

    redrafter evaluate --model my-base --drafter my-drafter --prompts questions.jsonl --shapes 5x5,10x5 --plot a.png

The base writes on from the prompts once at each temperature, by plain decoding; the steps that decoding would take
along those texts are then counted for every shape. Without --prompts, those that ship with the package.
"""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from redrafter.app.config_file import ConfigParser
from redrafter.app.flags import add_options, flag, floats, format_value, integers, option, read_options
from redrafter.app.loading import Pair
from redrafter.app.options import PROMPTS_HELP, LoadOptions, PromptOptions
from redrafter.app.program import run_command
from redrafter.checkpoints.drafters import check_beams
from redrafter.drafting.recurrent import RecurrentProposer
from redrafter.engine.recurrent import ReDrafter
from redrafter.engine.stopping import end_tokens
from redrafter.errors import ArgumentError
from redrafter.files.atomic_file import check_writable, write_atomically
from redrafter.measure.picture import check_picture
from redrafter.train.evaluate.plot import plot
from redrafter.train.evaluate.prompts import categories
from redrafter.train.evaluate.replay import walk
from redrafter.train.evaluate.report import Result, lines, report
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.evaluate.texts import written

__all__ = ["EvaluateOptions", "evaluate", "main"]

NOT_LOADED = ("num_beams", "draft_len_per_beam", "node_budget", "tuning", "max_input_len", "max_seq_len")
HOTTEST = 1e30  # float32 ends not far above
LARGEST = 4096  # nodes of a search: each is compared with all others


class Search(NamedTuple):
    """Beams and depth of a search, typed as 5x5."""

    beams: int
    depth: int

    def __str__(self) -> str:
        return f"{self.beams}x{self.depth}"


def searches(text: str) -> tuple[Search, ...]:
    """ "5x5,1x4" as searches."""
    return tuple(Search(*map(int, each.split("x"))) for each in text.split(","))


@dataclass(frozen=True)
class EvaluateOptions(PromptOptions):
    """On what a drafter is measured, and as which trees."""

    prompts: tuple[str, ...] = option((), PROMPTS_HELP, path=True)
    num_prompts: int | None = option(None, "of each category, so many, chosen by the seed (default: all)")
    new_tokens: int = option(128, "tokens that the model writes on from a prompt, at most")
    shapes: tuple[Search, ...] = option(
        (), "beams x depth of each search (default: the checkpoint's)", type=searches, metavar="WxK,..."
    )
    node_budgets: tuple[int, ...] = option(
        (), "nodes of a search to verify, the root counted (default: all of them)", type=integers, metavar="N,..."
    )
    temperatures: tuple[float, ...] = option((0, 1), "0 is greedy; above, sample", type=floats, metavar="T,...")
    seed: int = option(0, "of the choice of prompts and of the sampling")
    batch_size: int = option(32, "prompts that the model writes on from at once")
    plot: str | None = option(None, "draw acceptance by depth; needs matplotlib", metavar="FILE.png", path=True)
    json: str | None = option(None, "write everything as one JSON document", metavar="FILE", path=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("num_prompts", "batch_size", "node_budgets")
        for name, least in (*((each, 1) for each in counts), ("new_tokens", 2), ("temperatures", 0), ("seed", 0)):
            value = getattr(self, name)
            several = value if isinstance(value, tuple) else (value,)
            if not all(each is None or least <= each < math.inf for each in several):
                raise ArgumentError(f"{flag(name)} must be {least} or more, got {format_value(value)}")
        if max(self.temperatures) > HOTTEST:
            raise ArgumentError(
                f"--temperatures must be at most {HOTTEST:g}, got {format_value(max(self.temperatures))}"
            )
        if self.seed >= 1 << 62:
            raise ArgumentError(f"--seed must be less than 2**62, got {self.seed}")
        if not all(each.beams > 0 and each.depth > 0 for each in self.shapes):
            raise ArgumentError(
                f"--shapes are beams x depth, both 1 or more, such as 5x5,1x4; got {format_value(self.shapes)}"
            )

    def trees(self, own: Search) -> list[Shape]:
        """The shapes to measure: of each search each budget, and what the published method keeps. own: the search to
        measure where none was asked for."""
        found = []
        for beams, depth in self.shapes or (own,):
            whole = Shape(beams, depth, None).lattice
            found += [Shape(beams, depth, min(budget, whole)) for budget in self.node_budgets or (whole,)]
            found += [Shape(beams, depth, None)] if beams > 1 else []  # of one beam, the chain itself
        return list(dict.fromkeys(found))


def evaluate(pair: Pair, options: EvaluateOptions) -> dict[str, Any]:
    """Measure a loaded pair, whose engine is a `ReDrafter`. Returns the report. Raises `ArgumentError` and
    `CheckpointError` for options and prompts that cannot be used."""
    engine, own = pair.engine, pair.engine.proposer
    assert isinstance(engine, ReDrafter)
    assert isinstance(own, RecurrentProposer)
    trees = options.trees(Search(own.beams, own.depth))
    for tree in trees:
        check_beams(engine.drafter.config, tree.beams)
        if tree.lattice > LARGEST:
            raise ArgumentError(
                f"--shapes {tree.beams}x{tree.depth} has {tree.lattice} nodes; at most {LARGEST}, please"
            )
    target, found = engine.target, []
    context = target.fixed_rope_context
    room = context - options.new_tokens if context is not None else sys.maxsize
    if room < 1:
        raise ArgumentError(
            f"--new-tokens {options.new_tokens} leaves no room for a prompt in the model's context of {context}"
        )
    prompts = categories(options.prompts, pair.tokenizer, options.num_prompts, room, options.seed, **options.cut)
    every = [prompt for some in prompts.values() for prompt in some]
    for temperature in options.temperatures:
        texts = written(
            target,
            every,
            options.new_tokens,
            temperature,
            options.seed,
            ends=end_tokens(target.model, pair.tokenizer),
            rows=options.batch_size,
            options=engine.options,
            report=partial(_report_texts, temperature, len(every)),
        )
        found.append(Result(texts, trees, walk(engine.drafter, target, texts, trees)))
    return report(pair, options, {name: len(some) for name, some in prompts.items()}, found)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = ConfigParser(
        prog="redrafter evaluate",
        description="What a drafter is worth: tokens per step and how often each further draft is accepted, for many\n"
        "shapes of tree at once, counted along texts that the model writes once. A table on stdout.",
        epilog="examples:\n"
        "  redrafter evaluate --model my-base --drafter my-drafter --prompts questions.jsonl --num-prompts 20\n"
        "  redrafter evaluate --shapes 5x5,10x5,1x4 --node-budgets 26,13 --plot acceptance.png --json out.json",
        options=(EvaluateOptions, LoadOptions),
    )
    add_options(parser, EvaluateOptions, "measuring")
    add_options(parser, LoadOptions, "loading", without=NOT_LOADED)
    args = parser.parse_args(argv)

    def run() -> int:
        options = read_options(EvaluateOptions, args)
        if options.plot is not None:
            check_picture(Path(options.plot))
        if options.json is not None:
            check_writable(Path(options.json), "--json")
        pair = Pair.load(replace(read_options(LoadOptions, args), tuning="none"))
        document = {"command": shlex.join(["redrafter", "evaluate", *argv])} | evaluate(pair, options)
        print(*lines(document), sep="\n")
        if options.json is not None:
            write_atomically(Path(options.json), json.dumps(document, indent=1) + "\n")
        if options.plot is not None:
            plot(document, Path(options.plot))
        return 0

    return run_command(run)


def _report_texts(temperature: float, count: int, done: int) -> None:
    """Say on stderr how many of `count` texts are written."""
    _progress(f"temperature {temperature:g}: {done} of {count} texts")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
