"""Options of an evaluation: prompts, shapes of the tree and temperatures."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from redrafter.app.config_file import ConfigParser
from redrafter.app.drafter_alone import use_base_of_drafter
from redrafter.app.flags import add_options, flag, floats, format_value, integers, read_options
from redrafter.app.options import MAX_SEED, PROMPTS_HELP, LoadOptions, PromptOptions, SuiteOptions, check_numbers
from redrafter.app.paths import check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.errors import ArgumentError
from redrafter.options import option
from redrafter.tree.sizes import TreeShape

if TYPE_CHECKING:
    import torch

UNUSED_LOAD_OPTIONS = ("num_beams", "draft_len_per_beam", "node_budget", "max_input_len", "max_seq_len")
# Options that do not apply to a suite: they select other prompts, or explain drafts.
NOT_OF_SUITES = ("prompts", "prompt_share", "prompt_tokens", "prompt_lengths", "explain", "data")
MAX_TEMPERATURE = 1e30  # float32 ends not far above


class Search(NamedTuple):
    """Beams and depth of a beam search, written as 5x5."""

    beams: int
    depth: int

    def __str__(self) -> str:
        return f"{self.beams}x{self.depth}"


def parse_searches(text: str) -> tuple[Search, ...]:
    """Parse "5x5,1x4" as searches."""
    try:
        pairs = [(int(beams), int(depth)) for beams, depth in (search.split("x") for search in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write beams x depth, such as 5x5,1x4, not {text!r}") from None
    return tuple(Search(*pair) for pair in pairs)


@dataclass(frozen=True)
class EvaluateOptions(PromptOptions):
    """Options of an evaluation: prompts, shapes of the tree and temperatures."""

    prompts: tuple[str, ...] = option((), PROMPTS_HELP, path=True, names="prompts")
    num_prompts: int | None = option(
        None, "prompts, or questions of --suite, of each category, chosen by the seed (default: all)"
    )
    prompt_lengths: tuple[int, ...] = option(
        (),
        "measure after prompts of each of these numbers of tokens: the same prompts, cut at their beginning. Shorter "
        "ones are left out (default: prompts as they are)",
        type=integers,
        metavar="N,...",
    )
    new_tokens: int = option(128, "maximum number of new tokens per prompt")
    shapes: tuple[Search, ...] = option(
        (),
        "beams x depth of each beam search, such as 5x5,10x5 (default: the checkpoint's)",
        type=parse_searches,
        metavar="WxK,...",
    )
    node_budgets: tuple[int, ...] = option(
        (), "number of verified nodes of each search, including the root (default: all)", type=integers, metavar="N,..."
    )
    temperatures: tuple[float, ...] = option(
        (0, 1), "temperatures of the texts; 0 is greedy", type=floats, metavar="T,..."
    )
    seed: int = option(0, "seed of the choice of prompts and of the sampling")
    batch_size: int = option(32, "prompts that the model continues at once")
    adapter: str | None = option(
        None, "LoRA adapter that the model has: a directory that PEFT wrote", metavar="PATH", path=True, names="adapter"
    )
    plot: str | None = option(
        None, "plot acceptance by depth as a PNG; needs matplotlib", metavar="FILE.png", path=True, names="picture"
    )
    explain: bool = option(False, "report why drafts were missed, and commands that may improve it")
    data: tuple[str, ...] = option(
        (),
        "for --explain: data that the drafter was trained on, to compare with the base's own texts",
        path=True,
        names="data",
    )
    json: str | None = option(
        None, "write the whole report as one JSON document", metavar="FILE", path=True, names="new file"
    )

    card: bool = option(
        False, "write the acceptance of the first tree into the model card (README.md) in the directory of --drafter"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "num_prompts", "batch_size", "node_budgets")
        check_numbers(self, "prompt_lengths", "new_tokens", least=2)
        check_numbers(self, "temperatures", least=0, most=MAX_TEMPERATURE)
        check_numbers(self, "seed", least=0, most=MAX_SEED)
        if not all(search.beams > 0 and search.depth > 0 for search in self.shapes):
            raise ArgumentError(
                f"--shapes are beams x depth, both 1 or more, such as 5x5,1x4; got {format_value(self.shapes)}"
            )
        if self.data and not self.explain:
            raise ArgumentError("--data is compared by --explain only: give --explain too, or leave --data out")
        if self.explain and self.prompt_lengths:
            raise ArgumentError(
                "--explain counts drafts by the tokens before them itself: leave out --prompt-lengths, or --explain"
            )
        for name in ("shapes", "node_budgets"):
            if self.explain and len(values := vars(self)[name]) > 1:
                raise ArgumentError(
                    f"--explain explains one tree: give one of {flag(name)}, got {format_value(values)}"
                )

    @property
    def written_temperatures(self) -> tuple[float, ...]:
        """Temperatures of the texts: the requested ones, preceded by greedy for `--explain`."""
        return self.temperatures if not self.explain or 0 in self.temperatures else (0.0, *self.temperatures)

    def trees(self, default: Search) -> list[TreeShape]:
        """Return the shapes to measure: each node budget of each search, and the tree of the published method.

        `default` is the search to measure without `--shapes`.
        """
        trees = []
        for beams, depth in self.shapes or (default,):
            whole = TreeShape(beams, depth).lattice
            trees += [TreeShape(beams, depth, min(budget, whole)) for budget in self.node_budgets or (whole,)]
            trees += [TreeShape(beams, depth, None)] if beams > 1 else []  # for one beam it is the chain itself
        return list(dict.fromkeys(trees))

    def explained_tree(self, default: Search, device: "torch.device") -> TreeShape:
        """Return the tree that `--explain` explains: the requested one, or the untuned default of `generate`.

        `default` is the search to explain without `--shapes`, and `device` is the target's device.
        """
        from redrafter.tree.beam_search import node_count

        beams, depth = self.shapes[0] if self.shapes else default
        budget = self.node_budgets[0] if self.node_budgets else None
        return TreeShape(beams, depth, node_count(budget, beams, depth, device))


def build_parser() -> ConfigParser:
    """Return the parser of the command."""
    parser = ConfigParser(
        prog="redrafter evaluate",
        description="Measure a drafter: tokens per step and acceptance by depth, for many shapes of tree at once,\n"
        "counted on texts that the model generates once. Prints a table on stdout.",
        epilog="examples:\n"
        "  redrafter evaluate --model my-base --drafter my-drafter --prompts questions.jsonl --num-prompts 20\n"
        "  redrafter evaluate --model my-base --drafter my-drafter --explain --data trained-on.jsonl\n"
        "  redrafter evaluate --prompts long.jsonl --prompt-lengths 256,1024 --new-tokens 64 --temperatures 0\n"
        "  redrafter evaluate --shapes 5x5,10x5,1x4 --node-budgets 26,13 --plot acceptance.png --json out.json\n"
        "  redrafter evaluate --model my-base --drafter my-drafter --suite data/speed/qualitative --markdown out.md",
        options=(EvaluateOptions, SuiteOptions, LoadOptions),
    )
    add_options(parser, EvaluateOptions, "measuring")
    add_options(parser, SuiteOptions, "measuring on a standard suite")
    add_options(parser, LoadOptions, "loading", without=UNUSED_LOAD_OPTIONS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redrafter evaluate`. Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)

    def command() -> int:
        asked = read_options(SuiteOptions, args)
        asked.refuse_others(args, NOT_OF_SUITES)
        use_base_of_drafter(args)
        options, load = read_options(EvaluateOptions, args), read_options(LoadOptions, args)
        check_paths(options, asked, load)
        if options.card and not (load.drafter is not None and Path(load.drafter).is_dir()):
            raise ArgumentError("--card writes into the directory of a drafter: give it with --drafter")
        code: int = import_libraries("redrafter.train.evaluate.command").run_checked(args, words)
        return code

    return run_command(command)
