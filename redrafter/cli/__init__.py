"""The command line `redrafter`: imports the module of a command, and no other's."""

import importlib
import sys
from collections.abc import Sequence

from redrafter.app.program import print_message, run_command, run_rank
from redrafter.errors import ArgumentError
from redrafter.parallel.launched import launched_processes, process_rank

# Commands with their own parsers: module, and summary for `redrafter --help`.
SCRIPTS = {
    "serve": ("redrafter.serve.command", "serve a model over OpenAI's protocol"),
    "train": ("redrafter.train.config", "train a drafter for a model"),
    "regenerate": (
        "redrafter.train.regenerate.config",
        "regenerate the answers of a data set with a model, as training data",
    ),
    "convert": ("redrafter.convert.config", "merge a model and its drafter, or change their format"),
    "info": ("redrafter.convert.info", "describe a checkpoint"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by `argv`, by default `sys.argv[1:]`, and return its exit code.

    The code is 0 for success, 1 if compared outputs differ, 2 for a user error, and 130 or 141 if interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        process_rank()
    except ArgumentError as error:  # raised before anything could report it
        print_message("error", error)
        return 2
    if launched_processes() > 1 and argv and argv[0] != "train":  # `train` manages its own processes
        return run_rank(argv[0], lambda: _run(argv))
    return _run(argv)


def _run(argv: list[str]) -> int:
    """Run a command in this process, and return its exit code."""
    if argv and argv[0] in SCRIPTS:
        return run_command(lambda: importlib.import_module(SCRIPTS[argv[0]][0]).main(argv[1:]))
    code: int = importlib.import_module("redrafter.cli.commands").run_parsed(argv)
    return code
