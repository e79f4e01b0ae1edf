"""The arguments of every command, and the dispatch of those whose options one parser reads.

A command's module is imported once its options are validated, so that neither `--help` nor an error waits for torch.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from redrafter.app.drafter_alone import use_base_of_drafter
from redrafter.app.flags import add_options, read_options, temperatures
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.parser import Parser
from redrafter.app.paths import check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.app.rank_launcher import run_on_ranks
from redrafter.cli import SCRIPTS, measure_options
from redrafter.errors import ArgumentError, did_you_mean
from redrafter.options import option
from redrafter.version import __version__


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text from prompts.

    Text is printed while it is generated; on a terminal, accepted drafts are green. Several prompts are one batch:
    their texts are printed in order, each after a line with its prompt.

    Examples:
        redrafter generate --model my-base --drafter my-drafter "Once upon a time"
        redrafter generate --temperature 0.7,0.2 --seed 1 "Once upon a time" "The old man"
        redrafter generate --file prompts.txt --temperature 0.8 --seed 1 --json > out.json
        redrafter generate --model my-vision-base --chat --image cat.png "What is this?"

    Attributes:
        prompts: text to continue (default: all of stdin)
        file: text file with one prompt a line; or .jsonl with rows of prompts, texts or messages
        chat: use each prompt as a user's turn of a chat
        image: image that is shown before the prompt, with --chat, for a model that sees (may be repeated)
        num_return_sequences: texts per prompt
        compare: also decode without drafts, and print whether the tokens are equal and the speedup
        color: colour accepted drafts; auto colours on a terminal unless NO_COLOR is set
        json: print nothing on stdout but one JSON document
    """

    prompts: tuple[str, ...] = option((), positional=True, nargs="*", metavar="PROMPT")
    file: str | None = option(None, names="file")
    chat: bool = False
    image: tuple[str, ...] = option((), action="append", type=str, names="file")
    num_return_sequences: int = 1
    compare: bool = False
    color: str = option("auto", choices=("auto", "always", "never"))
    json: bool = False

    def __post_init__(self) -> None:
        if self.prompts and self.file is not None:
            raise ArgumentError("give prompts as arguments or with --file, not both")


@dataclass(frozen=True)
class ChatOptions:
    r"""Chat with a model that has a chat template; each line of input is a turn.

    /stats prints the speed so far, /reset forgets the chat, /exit or Ctrl-D ends it, Ctrl-C stops an answer.
    When the context is full, the oldest turns are forgotten.

    Examples:
        redrafter chat --model my-base --drafter my-drafter --system "Answer in one sentence."
        printf 'Hello\nAnd who are you?\n' | redrafter chat

    Attributes:
        system: system message
        compare: at the end, decode the same answers without drafts, and print both speeds
        color: colour accepted drafts; auto colours on a terminal unless NO_COLOR is set
    """

    system: str | None = option(None, metavar="TEXT")
    compare: bool = False
    color: str = option("auto", choices=("auto", "always", "never"))


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script by which a shell completes the names of commands, their flags and what these take.

    Examples:
        redrafter completion bash > ~/.local/share/bash-completion/completions/redrafter
        redrafter completion zsh > ~/.zfunc/_redrafter    # a folder of zsh's fpath
        redrafter completion fish > ~/.config/fish/completions/redrafter.fish

    Attributes:
        shell: bash, zsh or fish
    """

    shell: str | None = option(None, positional=True, choices=("bash", "zsh", "fish"), metavar="SHELL")


def run_parsed(argv: list[str]) -> int:
    """Run a command without a parser of its own, or print the error in `argv`. Returns its exit code."""
    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if not argv[0].startswith("-") and argv[0] not in parser.commands:
        hint = did_you_mean(argv[0], parser.commands)
        parser.error(f"there is no command {argv[0]}{hint or ': choose ' + ', '.join(parser.commands)}")
    measures = argv[0] in measure_options.COMMANDS
    added = measure_options.build_parser(argv[0]) if measures else parser.commands.get(argv[0], parser)
    args = added.parse_args(argv[1:]) if measures else parser.parse_args(argv)

    def command() -> int:
        if argv[0] == "completion":
            # Only completion needs the parsers of all commands, whose imports take time.
            scripts = {name: importlib.import_module(module).build_parser() for name, (module, _) in SCRIPTS.items()}
            scripts |= {name: measure_options.build_parser(name) for name in measure_options.COMMANDS}
            print(importlib.import_module("redrafter.cli.completion").completion_script(args.shell, parser, scripts))
            return 0
        use_base_of_drafter(args)
        groups: list[Any] = [read_options(kind, args) for kind in added.option_types]
        check_paths(*groups)
        vars(args).update(vars(groups[0]))  # with the defaults of the command's own options
        if (of_ranks := run_on_ranks(vars(args).get("tensor_parallel_size"), argv)) is not None:
            return of_ranks
        if measures:
            return int(getattr(import_libraries("redrafter.cli.measure"), argv[0])(*groups))
        return int(import_libraries(f"redrafter.cli.{args.command}").run_checked(args))

    return run_command(command)


def build_parser() -> Parser:
    """Return the parser of `redrafter`; parsing sets `args.command` to the name of the command."""
    parser = Parser(
        prog="redrafter",
        description="Make a Hugging Face causal LM write faster without changing a token of its output.",
        epilog='example:\n  redrafter generate --compare "Once upon a time"',
    )
    parser.add_argument("--version", action="version", version=f"redrafter {__version__}")
    commands = parser.add_commands()
    shared = (LoadOptions, "loading"), (DraftOptions, "drafting without a drafter"), (GenerationOptions, "generating")
    for name, summary, own, groups, types in (
        ("generate", "generate text from prompts", GenerateOptions, shared, {"temperature": temperatures}),
        ("chat", "chat with a model", ChatOptions, shared, None),
        ("completion", "print a script by which a shell completes commands and flags", CompletionOptions, (), None),
    ):
        added = commands.add_parser(name, help=summary, options=own)
        for options, title in ((own, ""), *groups):
            add_options(added, options, title, types=types)
    measuring = {name: summary for name, (summary, _) in measure_options.COMMANDS.items()}
    for name, summary in (measuring | {name: summary for name, (_, summary) in SCRIPTS.items()}).items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser
