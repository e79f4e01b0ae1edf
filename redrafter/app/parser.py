"""The arguments of every command."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from redrafter.app.flags import add_options, temperatures
from redrafter.app.options import (
    ONLY_TEXTS,
    BenchOptions,
    CompareOptions,
    DraftOptions,
    GenerationOptions,
    LoadOptions,
    TuneOptions,
)
from redrafter.app.program import report
from redrafter.app.trtllm_flags import Same, meaning_of, meanings, owner, translated
from redrafter.spelling import nearest
from redrafter.version import __version__

__all__ = ["Parser", "add_json", "build_parser"]

NUMBER = r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?"


class Parser(argparse.ArgumentParser):
    """Options by their full names, with dashes or underscores; a mistake is one line on stderr and exit code 2."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # else the command's own parser reads what follows its name
            self._check_numbers(args)
            args = _dashed(translated(args, self, note=lambda line: report("note", line)))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said here, where it is known which command's
            self._refuse(unknown)
        return found, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = unknown[0].partition("=")[0]
        if meanings(flag):
            self.error(f"{flag} is {owner(flag)} and has no meaning in `{self.prog}`: leave it out")
        near = nearest(flag, self._option_string_actions) if flag.startswith("-") else None
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near}?" if near else ""))

    def _check_numbers(self, args: Sequence[str]) -> None:
        """Refuse a number right behind an option that has its number already: it would pass for a prompt or a name."""
        positional = next((action for action in self._actions if not action.option_strings), None)
        if positional is None:
            return
        for index, arg in enumerate(args[: args.index("--")] if "--" in args else args):
            name, equals, _ = arg.partition("=")
            meaning = meaning_of(arg, self)
            known = meaning.option if isinstance(meaning, Same) else name.replace("_", "-")
            option = self._option_string_actions.get(known)
            stray = "".join(args[index + (1 if equals else 2) :][:1])
            if option is not None and option.type in (int, float, temperatures) and re.fullmatch(NUMBER, stray):
                each = f"; for one a prompt: {name} 0.7,0.2" if option.type is temperatures else ""
                self.error(
                    f"{name} takes one value, and {stray} after it would be a {positional.metavar}{each}; put {stray} "
                    "first, or behind --, where that is meant"
                )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"redrafter: error: {message} (see {self.prog} --help)\n")


def _dashed(args: Sequence[str]) -> list[str]:
    """`--num_beams=5` as `--num-beams=5`, up to a lone `--`."""
    end = args.index("--") if "--" in args else len(args)
    dashed = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        is_flag = name.startswith("--") and " " not in name
        dashed.append((name.replace("_", "-") if is_flag else name) + equals + value)
    return [*dashed, *args[end:]]


def build_parser() -> Parser:
    """The parser of `redrafter`; `args.command` is the command's name."""
    parser = Parser(
        prog="redrafter",
        description="Make a Hugging Face causal LM write faster without changing a token of its output.",
        epilog='example:\n  redrafter generate --compare "Once upon a time"',
    )
    parser.add_argument("--version", action="version", version=f"redrafter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_compare(commands)
    _add_tune(commands)
    _add_bench(commands)
    # These read their own arguments; see SCRIPTS in the package.
    commands.add_parser("serve", help="serve a model over OpenAI's protocol", add_help=False)
    commands.add_parser("train", help="train a drafter for a model", add_help=False)
    commands.add_parser("evaluate", help="say what a drafter is worth, by shape of tree and category", add_help=False)
    commands.add_parser("regenerate", help="let a model answer a data set's prompts, to train on", add_help=False)
    commands.add_parser("convert", help="merge a model and its drafter, or change their format", add_help=False)
    commands.add_parser("info", help="say what a checkpoint is", add_help=False)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="write on from prompts",
        description="Write on from prompts. Text is printed as it is made; on a terminal, accepted drafts are green.\n"
        "Several prompts are one batch: their texts come in order, each under a line that names its prompt.",
        epilog="examples:\n"
        '  redrafter generate --model my-base --drafter my-drafter "Once upon a time"\n'
        '  redrafter generate --temperature 0.7,0.2 --seed 1 "Once upon a time" "The old man"\n'
        "  redrafter generate --file prompts.txt --temperature 0.8 --seed 1 --json > out.json",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to write on from (default: all of stdin)")
    parser.add_argument("--file", metavar="FILE", help="read prompts from a text file, one a line, blank lines skipped")
    parser.add_argument("--chat-template", action="store_true", help="make each prompt a user's turn of a chat")
    parser.add_argument(
        "--num-return-sequences", type=int, default=1, metavar="N", help="texts per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="decode plainly too, and say whether the tokens are equal and how much faster",
    )
    add_json(parser)
    _add_color(parser)
    add_options(parser, LoadOptions, "loading")
    add_options(parser, DraftOptions, "drafting without a drafter")
    add_options(parser, GenerationOptions, "writing", types={"temperature": temperatures})


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model that has a chat template: a line of input is a turn.\n"
        "/stats says how fast it went, /reset forgets the talk, /exit or Ctrl-D ends it, Ctrl-C stops an answer.\n"
        "When the context is full, the oldest turns are forgotten.",
        epilog="examples:\n"
        '  redrafter chat --model my-base --drafter my-drafter --system "Answer in one sentence."\n'
        "  printf 'Hello\\nAnd who are you?\\n' | redrafter chat",
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the talk")
    _add_color(parser)
    add_options(parser, LoadOptions, "loading")
    add_options(parser, DraftOptions, "drafting without a drafter")
    add_options(parser, GenerationOptions, "writing")


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="set ways of drafting side by side on the same prompts",
        description="Plain decoding, a drafter, a draft model and prompt lookup, those that there are, in turn on the\n"
        "same prompts with the same model. A table, the texts where they part, one JSON document as the last line.\n"
        "Exit code 1 when a way that promises plain decoding's tokens wrote others where the logits were no near-tie.",
        epilog="examples:\n"
        "  redrafter compare --model my-70b --draft-model my-1b --prompts prompts.json --max-input-len 200\n"
        "  redrafter compare --model my-base --drafter my-drafter --batch-size 8 --temperature 0.7 --seed 1",
    )
    add_options(parser, CompareOptions, "comparing")
    add_options(parser, LoadOptions, "loading", without=("max_input_len",))
    add_options(parser, DraftOptions, "drafting without a drafter", without=("prompt_lookup",))
    add_options(parser, GenerationOptions, "writing", without=("speculate", *ONLY_TEXTS))


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure which tree suits which batch size",
        description="Measure, on your prompts and this device, how fast trees of several shapes are at several batch\n"
        "sizes. Prints the best by batch size, or `off` where plain decoding is faster, and writes it where\n"
        "`from_pretrained` and the other commands find it. It changes how fast a text comes, never the text.",
        epilog="examples:\n"
        "  redrafter tune --model my-base --drafter my-drafter --prompts my-prompts.jsonl\n"
        "  redrafter tune --batch-sizes 1,4 --beams 5 --lengths 5 --seconds 60 --plot tuning.png",
    )
    add_json(parser)
    add_options(parser, TuneOptions, "measuring")
    add_options(
        parser,
        LoadOptions,
        "loading",
        without=("num_beams", "draft_len_per_beam", "node_budget", "tuning"),
    )


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a pair writes, and where the time goes",
        description="Plain decoding and speculation in turn on the same prompts: tokens per second by batch size, the\n"
        "parts of a step beside what moving their bytes takes, whether the tokens are equal, and, if asked for, what\n"
        "Hugging Face's own generate does. Tables on stdout, one JSON document as its last line; progress on stderr.",
        epilog="examples:\n"
        "  redrafter bench --max-new-tokens 64\n"
        "  redrafter bench --model my-base --drafter my-drafter --dtype bfloat16 \\\n"
        "      --batch-sizes 1,8,64 --against eager,static,assisted --plots plots --json bench.json",
    )
    add_options(parser, LoadOptions, "loading")
    add_options(parser, BenchOptions, "measuring")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag of a command that prints a document."""
    parser.add_argument("--json", action="store_true", help="print nothing on stdout but one JSON document")


def _add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour accepted drafts; auto: on a terminal, unless NO_COLOR is set (default: %(default)s)",
    )
