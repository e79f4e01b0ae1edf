"""The argument parser of every command: full names, underscores for dashes, errors in one line."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from redrafter.app.flag_translation import find_meaning, flag_owner, translate
from redrafter.app.flags import temperatures
from redrafter.app.foreign_flags import Alias
from redrafter.app.program import print_message
from redrafter.errors import did_you_mean

__all__ = ["Parser", "add_json"]

NUMBER = r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?"


class Parser(argparse.ArgumentParser):
    """A parser that takes options by their full names and reports a mistake as one line on stderr with exit code 2.

    Names may have underscores for dashes. Flags of other programs and commands are translated.

    Attributes:
        commands: Parsers of the commands by name, where `add_commands` was called; else empty.
    """

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)
        self.commands: Mapping[str, Parser] = {}

    def add_commands(self) -> Any:
        """Add a first word that chooses a command, as `args.command`; return the object that parsers are added to."""
        commands = self.add_subparsers(dest="command", metavar="COMMAND", required=True)
        self.commands = commands.choices
        return commands

    def has_option(self, name: str) -> bool:
        """Return whether the parser has an option, which may be spelt with underscores."""
        return name.replace("_", "-") in self._option_string_actions

    def has_positional(self, name: str) -> bool:
        """Return whether the parser takes words without a flag under this name."""
        return any(action.dest == name and not action.option_strings for action in self._actions)

    def takes_value(self, name: str) -> bool:
        """Return whether an option of the parser is followed by a value."""
        return self._option_string_actions[name].nargs != 0

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; an unknown argument ends the program, with a hint at the option that may be meant."""
        args = list(sys.argv[1:] if args is None else args)
        if not self.commands:  # or the parser of the command gets the words after its name
            self._refuse_stray_numbers(args)
            args = _with_dashes(translate(args, self, note=lambda line: print_message("note", line)))
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:  # refused here and not in `parse_args`, since only this parser knows the name of the command
            self._refuse_unknown(unknown)
        return parsed, unknown

    def _refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        flag = words[0].partition("=")[0]
        if owner := flag_owner(flag):
            self.error(f"{flag} is {owner}'s and has no meaning in `{self.prog}`: leave it out")
        hint = did_you_mean(flag, self._option_string_actions) if flag.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    def _refuse_stray_numbers(self, args: Sequence[str]) -> None:
        """Refuse a number right after an option that has its value: it would be taken for a prompt or a name."""
        positional = next((action for action in self._actions if not action.option_strings), None)
        if positional is None:
            return
        for index, arg in enumerate(args[: args.index("--")] if "--" in args else args):
            name, equals, _ = arg.partition("=")
            meaning = find_meaning(arg, self)
            own_name = meaning.option if isinstance(meaning, Alias) else name.replace("_", "-")
            option = self._option_string_actions.get(own_name)
            stray = "".join(args[index + (1 if equals else 2) :][:1])
            if option is not None and option.type in (int, float, temperatures) and re.fullmatch(NUMBER, stray):
                hint = f"; for one a prompt: {name} 0.7,0.2" if option.type is temperatures else ""
                self.error(
                    f"{name} takes one value, and {stray} after it would be a {positional.metavar}{hint}; put {stray} "
                    "first, or behind --, where that is meant"
                )

    def error(self, message: str) -> NoReturn:
        """Print an error as one line on stderr and exit with code 2."""
        self.exit(2, f"redrafter: error: {message} (see {self.prog} --help)\n")


def _with_dashes(args: Sequence[str]) -> list[str]:
    """Return `--num-beams=5` for `--num_beams=5`, for every flag before a lone `--`."""
    end = args.index("--") if "--" in args else len(args)
    dashed = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        is_flag = name.startswith("--") and " " not in name
        dashed.append((name.replace("_", "-") if is_flag else name) + equals + value)
    return [*dashed, *args[end:]]


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--json`, of a command that can print one JSON document."""
    parser.add_argument("--json", action="store_true", help="print nothing on stdout but one JSON document")
