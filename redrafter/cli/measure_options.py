"""Options and parsers of `bench`, `compare` and `evaluate`, in a module without torch so that `--help` is fast."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from redrafter.app.config_file import ConfigParser, command_parser
from redrafter.app.flags import flag, floats, format_value, integers, names
from redrafter.app.options import COUNT, MAX_SEED, DraftOptions, GenerationOptions, LoadOptions, PromptOptions
from redrafter.errors import ArgumentError
from redrafter.options import between, option
from redrafter.tree.sizes import TreeShape

RIVALS = ("eager", "static")  # baselines that `--against` may name
# Generation options without a flag in `redrafter compare`: transformers' assisted generation does not support them.
NOT_IN_COMPARE = ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "stop_token_ids", "adapter")
NOT_IN_EVALUATE = ("num_beams", "draft_len_per_beam", "node_budget", "max_input_len", "max_seq_len")
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
class MeasureOptions(PromptOptions):
    """Options of every measurement: its prompts, and the files that it writes in addition to the table.

    Attributes:
        prompts: prompts. In a .jsonl or .json file or a dataset: the text, prompt, input and instruction of each row,
            or its messages up to the first answer. In any other file: one prompt a line (default: sixteen that ship
            with redrafter)
        num_prompts: use the first N prompts (default: all)
        suite: measure on a standard suite of questions: a directory with SPEED-Bench, Spec-Bench or MT-Bench as their
            makers' scripts prepare them. All turns are asked through the chat template, each after the model's own
            answers; --num-prompts is of questions of each category, all by default
        json: also write a line of JSON for each row of the table
        csv: also write the table as CSV
        markdown: also write the table in Markdown
        plot: also draw acceptance and speed; needs matplotlib
    """

    prompts: tuple[str, ...] = option((), names="prompts")
    num_prompts: int | None = option(None, check=COUNT)
    suite: str | None = option(None, names="suite")
    json: str | None = option(None, names="new file")
    csv: str | None = option(None, names="new file")
    markdown: str | None = option(None, names="new file")
    plot: str | None = option(None, names="picture")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "prompt_tokens", *self.other_prompts):
            if self.suite is not None and vars(self)[name]:
                raise ArgumentError(f"{flag(name)} has no meaning with --suite: leave it out")
        for name in ("json", "csv", "markdown", "plot"):
            if vars(self)[name] and Path(vars(self)[name]).resolve() in (Path(file).resolve() for file in self.prompts):
                raise ArgumentError(f"{flag(name)} would overwrite the prompts: give another name")

    @property
    def other_prompts(self) -> tuple[str, ...]:
        """Further options that select other prompts than a suite."""
        return ()


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    r"""Measure undrafted decoding and speculation in turn on the same prompts.

    Prints one table: tokens per second by batch size, the time of each part of a step and the time to move its bytes,
    whether the tokens are equal, and, with --against, Hugging Face's own generate.

    Examples:
        redrafter bench --max-new-tokens 64
        redrafter bench --model my-base --drafter my-drafter --dtype bfloat16 \
              --batch-sizes 1,8,64 --against eager,static --plot bench.png --json bench.jsonl
        redrafter bench --suite data/speed/qualitative --batch-sizes 1,8 --csv speed.csv --markdown speed.md

    Attributes:
        num_prompts: least number of rows to measure each batch size on
        batch_sizes: rows decoded at once
        repeats: runs of each measurement; the median counts
        against: also measure Hugging Face's generate, one prompt at a time: eager, static (compiled) (default: none)
        max_new_tokens: new tokens of each row; no token ends a text early, but answers of a suite
        temperature: 0 is greedy, a higher value samples
        seed: seed of the sampling
    """

    num_prompts: int | None = option(8, check=COUNT)
    batch_sizes: Sequence[int] = option((1,), type=integers, check=COUNT)
    repeats: int = option(3, check=COUNT)
    against: Sequence[str] = option((), type=names, metavar="WHICH,...")
    max_new_tokens: int = option(128, check=between(2, 1_000_000))
    temperature: float = 0.0
    seed: int = option(0, check=between(0, MAX_SEED))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")
        for name in self.against:
            if name not in RIVALS:
                raise ArgumentError(f"--against takes any of {', '.join(RIVALS)}, got {name!r}")
        if self.against and 1 not in self.batch_sizes:
            raise ArgumentError("--against measures one prompt at a time: add 1 to --batch-sizes")


@dataclass(frozen=True)
class CompareOptions(MeasureOptions):
    """Measure methods of drafting on the same prompts with the same model.

    These are undrafted decoding, a drafter, a draft model and prompt lookup, as far as they are given. Prints one
    table, and where texts differ. Exit code 1 when a method that promises the tokens of undrafted decoding generated
    others, except where the logits of both tokens were a near-tie.

    Examples:
        redrafter compare --model my-70b --draft-model my-1b --prompts prompts.json --max-input-len 200
        redrafter compare --model my-base --drafter my-drafter --batch-size 8 --temperature 0.7 --seed 1

    Attributes:
        max_input_len: leave out prompts of more than N tokens (default: none)
        batch_size: prompts decoded at once
        repeats: runs of each method, in turn; the median counts
        assisted: also measure Hugging Face's assisted generation with the same draft model, one prompt at a time
        disable_output_comparison: do not compare the outputs, and do not fail when they differ
    """

    max_input_len: int | None = option(None, check=COUNT)
    batch_size: int = option(1, check=COUNT)
    repeats: int = option(1, check=COUNT)
    assisted: bool = False
    disable_output_comparison: bool = False


@dataclass(frozen=True)
class EvaluateOptions(MeasureOptions):
    """Measure a drafter: tokens per step and acceptance by depth, for many shapes of tree at once.

    They are counted on texts that the model generates once. Prints one table.

    Examples:
        redrafter evaluate --model my-base --drafter my-drafter --prompts questions.jsonl --num-prompts 20
        redrafter evaluate --model my-base --drafter my-drafter --explain --prompts mine.jsonl
        redrafter evaluate --prompts long.jsonl --prompt-lengths 256,1024 --new-tokens 64 --temperatures 0
        redrafter evaluate --shapes 5x5,10x5,1x4 --node-budgets 26,13 --plot acceptance.png --json out.jsonl
        redrafter evaluate --model my-base --drafter my-drafter --suite data/speed/qualitative --markdown out.md

    Attributes:
        num_prompts: prompts of each category, chosen by the seed (default: all)
        prompt_lengths: measure after prompts of each of these numbers of tokens: the same prompts, cut at their
            beginning. Shorter ones are left out (default: prompts as they are)
        new_tokens: maximum number of new tokens per prompt
        shapes: beams x depth of each beam search, such as 5x5,10x5 (default: the checkpoint's)
        node_budgets: number of verified nodes of each search, including the root (default: all)
        temperatures: temperatures of the texts; 0 is greedy
        seed: seed of the choice of prompts and of the sampling
        batch_size: prompts that the model continues at once
        adapter: LoRA adapter that the model has: a directory that PEFT wrote
        explain: report why drafts were missed, and commands that may improve it
        card: write the acceptance of the first tree into the model card (README.md) in the directory of --drafter
    """

    num_prompts: int | None = option(None, check=COUNT)
    prompt_lengths: tuple[int, ...] = option((), type=integers, check=between(2, 1_000_000))
    new_tokens: int = option(128, check=between(2, 1_000_000))
    shapes: tuple[Search, ...] = option((), type=parse_searches, metavar="WxK,...")
    node_budgets: tuple[int, ...] = option((), type=integers, check=COUNT)
    temperatures: tuple[float, ...] = option((0, 1), type=floats, check=between(0, MAX_TEMPERATURE))
    seed: int = option(0, check=between(0, MAX_SEED))
    batch_size: int = option(32, check=COUNT)
    adapter: str | None = option(None, names="adapter")
    explain: bool = False
    card: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(search.beams > 0 and search.depth > 0 for search in self.shapes):
            message = f"--shapes are beams x depth, both 1 or more, such as 5x5,1x4; got {format_value(self.shapes)}"
            raise ArgumentError(message)
        if self.explain and self.prompt_lengths:
            raise ArgumentError(
                "--explain counts drafts by the tokens before them itself: leave out --prompt-lengths, or --explain"
            )
        for name in ("shapes", "node_budgets"):
            if self.explain and len(values := vars(self)[name]) > 1:
                message = f"--explain explains one tree: give one of {flag(name)}, got {format_value(values)}"
                raise ArgumentError(message)

    @property
    def other_prompts(self) -> tuple[str, ...]:
        """Further options that select other prompts than a suite."""
        return ("prompt_lengths", "explain")

    @property
    def written_temperatures(self) -> tuple[float, ...]:
        """Temperatures of the texts: the requested ones, preceded by greedy for `--explain`."""
        greedy = (0.0,) if self.explain and 0 not in self.temperatures else ()
        return tuple(dict.fromkeys((*greedy, *self.temperatures)))

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


# Of each command its summary, and the groups of its options.
COMMANDS: dict[str, tuple[str, tuple[tuple[type, str, tuple[str, ...]], ...]]] = {
    "bench": (
        "measure how fast a model and its drafter are, and where the time goes",
        ((BenchOptions, "measuring", ()), (LoadOptions, "loading", ())),
    ),
    "compare": (
        "compare drafting methods on the same prompts",
        (
            (CompareOptions, "comparing", ()),
            (LoadOptions, "loading", ("max_input_len",)),
            (DraftOptions, "drafting without a drafter", ("prompt_lookup",)),
            (GenerationOptions, "generating", ("speculate", *NOT_IN_COMPARE)),
        ),
    ),
    "evaluate": (
        "measure how many drafts of a drafter are accepted, by tree shape and category",
        ((EvaluateOptions, "measuring", ()), (LoadOptions, "loading", NOT_IN_EVALUATE)),
    ),
}


def build_parser(name: str) -> ConfigParser:
    """Return the parser of a command of `COMMANDS`."""
    return command_parser(f"redrafter {name}", *COMMANDS[name][1])
