"""The arguments of every command, and the dispatch of those whose options one parser reads.

A command's module is imported once its options are validated, so that neither `--help` nor an error waits for torch.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from redrafter.app.drafter_alone import use_base_of_drafter
from redrafter.app.flags import add_options, read_options, temperatures
from redrafter.app.options import DraftOptions, GenerationOptions, LoadOptions
from redrafter.app.parser import Parser, add_json
from redrafter.app.paths import check_file, check_paths
from redrafter.app.program import import_libraries, run_command
from redrafter.app.rank_launcher import run_on_ranks
from redrafter.cli import SCRIPTS, measure_options
from redrafter.errors import did_you_mean
from redrafter.version import __version__


def run_parsed(argv: list[str]) -> int:
    """Run a command without a parser of its own, or print what is wrong with `argv`. Returns its exit code."""
    if argv and argv[0] in measure_options.COMMANDS:
        return measure_options.main(argv[0], argv[1:])
    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if not argv[0].startswith("-") and argv[0] not in parser.commands:
        hint = did_you_mean(argv[0], parser.commands)
        parser.error(f"there is no command {argv[0]}{hint or ': choose ' + ', '.join(parser.commands)}")
    args = parser.parse_args(argv)

    def command() -> int:
        if args.command == "completion":
            # Only completion needs the parsers of all commands, whose imports take time.
            scripts = {name: importlib.import_module(module).build_parser() for name, (module, _) in SCRIPTS.items()}
            scripts |= {name: measure_options.build_parser(name) for name in measure_options.COMMANDS}
            print(importlib.import_module("redrafter.cli.completion").completion_script(args.shell, parser, scripts))
            return 0
        _check(args, parser.commands[args.command].option_types)
        if (of_ranks := run_on_ranks(vars(args).get("tensor_parallel_size"), argv)) is not None:
            return of_ranks
        return int(import_libraries(f"redrafter.cli.{args.command}").run_checked(args))

    return run_command(command)


def _check(args: argparse.Namespace, option_types: Sequence[type]) -> None:
    """Validate options, and the files that they name, as far as possible before a model is loaded."""
    use_base_of_drafter(args)
    check_paths(*(read_options(kind, args) for kind in option_types))
    if args.command == "generate" and args.file is not None and not args.prompts:
        check_file(args.file, "--file")
    for image in args.image if args.command == "generate" else ():
        check_file(image, "--image")


def build_parser() -> Parser:
    """Return the parser of `redrafter`; parsing sets `args.command` to the name of the command."""
    parser = Parser(
        prog="redrafter",
        description="Make a Hugging Face causal LM write faster without changing a token of its output.",
        epilog='example:\n  redrafter generate --compare "Once upon a time"',
    )
    parser.add_argument("--version", action="version", version=f"redrafter {__version__}")
    commands = parser.add_commands()
    loading, generating = (LoadOptions, "loading", ()), (GenerationOptions, "generating", ())
    drafting = (DraftOptions, "drafting without a drafter", ())

    def add(name: str, help: str, description: str, examples: Sequence[str], *groups: Any, **types: Any) -> Parser:
        """Add a command; each group is a dataclass of options, its title, and the fields without a flag."""
        added: Parser = commands.add_parser(name, help=help, description=description, examples=examples)
        for options, title, without in groups:
            add_options(added, options, title, without=without, types=types)
        return added

    generate = add(
        "generate",
        "generate text from prompts",
        "Generate text from prompts. Text is printed while it is generated; on a terminal, accepted\n"
        "drafts are green. Several prompts are one batch: their texts are printed in order, each after a\n"
        "line with its prompt.",
        (
            'redrafter generate --model my-base --drafter my-drafter "Once upon a time"',
            'redrafter generate --temperature 0.7,0.2 --seed 1 "Once upon a time" "The old man"',
            "redrafter generate --file prompts.txt --temperature 0.8 --seed 1 --json > out.json",
            'redrafter generate --model my-vision-base --chat --image cat.png "What is this?"',
        ),
        loading,
        drafting,
        generating,
        temperature=temperatures,
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue (default: all of stdin)")
    generate.add_argument(
        "--file",
        metavar="FILE",
        help="text file with one prompt a line; or .jsonl with rows of prompts, texts or messages",
    )
    generate.add_argument("--chat", action="store_true", help="use each prompt as a user's turn of a chat")
    shown = "image that is shown before the prompt, with --chat, for a model that sees (may be repeated)"
    generate.add_argument("--image", action="append", default=[], metavar="FILE", help=shown)
    copies = "texts per prompt (default: %(default)s)"
    generate.add_argument("--num-return-sequences", type=int, default=1, metavar="N", help=copies)
    compared = "also decode without drafts, and print whether the tokens are equal and the speedup"
    generate.add_argument("--compare", action="store_true", help=compared)
    add_json(generate)
    chat = add(
        "chat",
        "chat with a model",
        "Chat with a model that has a chat template; each line of input is a turn.\n"
        "/stats prints the speed so far, /reset forgets the chat, /exit or Ctrl-D ends it, Ctrl-C stops an answer.\n"
        "When the context is full, the oldest turns are forgotten.",
        (
            'redrafter chat --model my-base --drafter my-drafter --system "Answer in one sentence."',
            "printf 'Hello\\nAnd who are you?\\n' | redrafter chat",
        ),
        loading,
        drafting,
        generating,
    )
    chat.add_argument("--system", metavar="TEXT", help="system message")
    compared = "at the end, decode the same answers without drafts, and print both speeds"
    chat.add_argument("--compare", action="store_true", help=compared)
    colours = "colour accepted drafts; auto colours on a terminal unless NO_COLOR is set (default: %(default)s)"
    for each in (generate, chat):
        each.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=colours)
    completed = add(
        "completion",
        "print a script by which a shell completes commands and flags",
        "Print a script by which a shell completes the names of commands, their flags and what these take.",
        (
            "redrafter completion bash > ~/.local/share/bash-completion/completions/redrafter",
            "redrafter completion zsh > ~/.zfunc/_redrafter    # a folder of zsh's fpath",
            "redrafter completion fish > ~/.config/fish/completions/redrafter.fish",
        ),
    )
    shells = ("bash", "zsh", "fish")
    completed.add_argument("shell", choices=shells, metavar="SHELL", help="bash, zsh or fish")
    measuring = {name: command.summary for name, command in measure_options.COMMANDS.items()}
    for name, summary in (measuring | {name: summary for name, (_, summary) in SCRIPTS.items()}).items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser
