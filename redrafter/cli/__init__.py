"""The command line `redrafter`.

A command imports its modules when it runs, so that `--help` does not wait for torch.
"""

import importlib
import sys
from collections.abc import Sequence

from redrafter.app.program import run_command, run_rank
from redrafter.cli.commands import build_parser
from redrafter.parallel.launched import launched_processes

__all__ = ["main"]

# Modules of the commands that parse their own arguments.
SCRIPTS = {
    "convert": "redrafter.convert.convert_checkpoint",
    "info": "redrafter.convert.info",
    "evaluate": "redrafter.train.evaluate.command",
    "regenerate": "redrafter.train.regenerate.command",
    "serve": "redrafter.serve.command",
    "train": "redrafter.train.train_drafter",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words of the command line after `redrafter`; None takes those of the process.

    Returns:
        The exit code: 0, 1 of commands that compare outputs, 2 for an error of the user, 130 and 141 when interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if launched_processes() > 1 and argv and argv[0] != "train":  # which has processes of its own kind
        return run_rank(argv[0], lambda: _run(argv))
    return _run(argv)


def _run(argv: list[str]) -> int:
    """Run a command in this process, and return its exit code."""
    if argv and argv[0] in SCRIPTS:
        return run_command(lambda: importlib.import_module(SCRIPTS[argv[0]]).main(argv[1:]))
    args = build_parser().parse_args(argv)
    return run_command(lambda: importlib.import_module(f"redrafter.cli.{args.command}").run(args))
