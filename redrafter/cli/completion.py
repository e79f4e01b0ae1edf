"""`redrafter completion`: print a script that completes commands, flags, choices and file names in a shell."""

import re
from collections.abc import Mapping

import shtab

from redrafter.app.parser import Parser


def completion_script(shell: str, parser: Parser, scripts: Mapping[str, Parser]) -> str:
    """Return the script of a shell.

    Args:
        shell: `bash`, `zsh` or `fish`.
        parser: The parser of `redrafter`. Its commands are changed: do not parse with it afterwards.
        scripts: Parsers of the commands that `parser` knows by name alone.
    """
    parser.commands.update(scripts)
    for command in parser.commands.values():
        # A shell shows one line of a description.
        command.description = re.split(r"[.:;]\s", f"{command.description} ")[0].replace("\n", " ")
        for action in command._actions:  # noqa: SLF001  argparse has no public name of them
            if action.type in (None, str) and action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # an attribute of shtab's
    return shtab.complete(parser, shell)
