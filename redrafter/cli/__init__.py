"""The command line `redrafter`.

Only what a command needs is imported when it runs, so that `--help` does not wait for torch.
"""

import importlib
import sys
from collections.abc import Sequence

from redrafter.app.parser import build_parser
from redrafter.app.program import guarded

__all__ = ["main"]

# Commands that are programs of their own and read their own arguments.
SCRIPTS = {
    "convert": "redrafter.convert.convert_checkpoint",
    "info": "redrafter.convert.info",
    "evaluate": "redrafter.train.evaluate.command",
    "regenerate": "redrafter.train.regenerate.command",
    "serve": "redrafter.serve.command",
    "train": "redrafter.train.train_drafter",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 2 for what the user can mend, 130 and 141 when cut short."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in SCRIPTS:
        return guarded(lambda: importlib.import_module(SCRIPTS[argv[0]]).main(argv[1:]))
    args = build_parser().parse_args(argv)
    return guarded(lambda: importlib.import_module(f"redrafter.cli.{args.command}").run(args))
