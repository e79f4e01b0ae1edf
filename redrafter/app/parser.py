"""Argument parser of all commands: underscores for dashes, flags of other programs, one-line errors."""

import argparse
import re
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any, NoReturn

from redrafter.app.flags import temperatures
from redrafter.app.foreign_flags import ALIASES, REPEATED
from redrafter.errors import did_you_mean
from redrafter.options import command_texts

NUMBER = r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?"
ALL_WORDS = 1 << 20  # word limit of a flag that takes all words up to the next flag


class Parser(argparse.ArgumentParser):
    """A parser that requires full option names and reports an error as one line on stderr with exit code 2.

    Names may use underscores for dashes. Flags of other programs and commands are translated.

    Attributes:
        commands: Parsers of the commands by name; empty unless `add_commands` was called.
        option_types: Dataclasses whose flags `add_options` has added.
    """

    def __init__(self, *, options: type | None = None, **kwargs: Any):
        """Create a parser, whose `--help` has the description and the examples in the docstring of its options."""
        if options is not None:
            kwargs |= command_texts(options)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)
        self.commands: MutableMapping[str, Parser] = {}
        self.option_types: list[type] = []

    def add_commands(self) -> Any:
        """Add a first word that chooses a command, as `args.command`; return the object that parsers are added to."""
        commands = self.add_subparsers(dest="command", metavar="COMMAND", required=True)
        self.commands = commands.choices
        return commands

    def has_option(self, name: str) -> bool:
        """Return whether the parser has an option, which may be spelt with underscores."""
        return name.replace("_", "-") in self._option_string_actions

    def own_name(self, word: str) -> str | None:
        """Return the option or positional argument that another program's flag, perhaps with `=value`, names here.

        None if the command defines an option of that name, or if nothing here corresponds to the flag.
        """
        if self.has_option(word.partition("=")[0]):
            return None
        positional = {action.dest for action in self._actions if not action.option_strings}
        names = ALIASES.get(_flag_name(word), ())
        return next((name for name in names if name in positional or self.has_option(name.partition("=")[0])), None)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; an unknown argument exits the program with a hint at a similar option."""
        args = list(sys.argv[1:] if args is None else args)
        if not self.commands:  # else the command's own parser receives the words that follow its name
            self._refuse_stray_numbers(args)
            args = self._translate(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:  # refused here and not in `parse_args`, since only this parser knows the name of the command
            flag = unknown[0].partition("=")[0]
            hint = ""
            if flag.startswith("-"):
                hint = (
                    did_you_mean(flag, self._option_string_actions) or "; docs/migration.md has other programs' flags"
                )
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _refuse_stray_numbers(self, args: Sequence[str]) -> None:
        """Reject a number that follows an option's value, since it would be parsed as a prompt or a name."""
        positional = next((action for action in self._actions if not action.option_strings), None)
        if positional is None:
            return
        for index, arg in enumerate(args[: args.index("--")] if "--" in args else args):
            name, equals, _ = arg.partition("=")
            # `--random-seed 8 9` is checked like the option that it is an alias of.
            option = self._option_string_actions.get(self.own_name(arg) or name.replace("_", "-"))
            stray = "".join(args[index + (1 if equals else 2) :][:1])
            if option is None or option.nargs is not None or option.type not in (int, float, temperatures):
                continue
            if re.fullmatch(NUMBER, stray):
                hint = f"; for one a prompt: {name} 0.7,0.2" if option.type is temperatures else ""
                self.error(
                    f"{name} takes one value, and {stray} after it would be a {positional.metavar}{hint}; put {stray} "
                    "first, or following --, if that is intended"
                )

    def _translate(self, args: Sequence[str]) -> list[str]:
        """Replace flags of other programs with this command's options, and underscores with dashes."""
        translated, words = list[str](), list(args)
        while words:
            word = words.pop(0)
            if word == "--":
                return [*translated, word, *words]
            name, equals, value = word.partition("=")
            own, flag = self.own_name(word), _flag_name(word)
            if own is None:
                is_flag = name.startswith("--") and " " not in name
                translated.append((flag if is_flag else name) + equals + value)
                continue
            option = self._option_string_actions.get(own)
            # Number of following words that belong to the flag.
            most = ALL_WORDS if flag in REPEATED else int(option is not None and option.nargs != 0)
            if not own.startswith("-"):
                most = max(most, 1)
            # A word with spaces that starts with a dash is a prompt, not a flag.
            next_flag = (at for at, word in enumerate(words) if word.startswith("-") and " " not in word)
            values = [value] if equals else words[: next(next_flag, len(words))][:most]
            if equals and not most:
                self.error(f"{name} is a switch and takes no value, got {value!r}")
            if most and not values:
                self.error(f"argument {name}: expected a value")
            if not equals:
                del words[: len(values)]
            if own.startswith("-"):
                translated += [f"{own}={value}" for value in values] or [own]
            else:
                translated += values
        return translated

    def error(self, message: str) -> NoReturn:
        """Print an error as one line on stderr and exit with code 2."""
        self.exit(2, f"redrafter: error: {message} (see {self.prog} --help)\n")


def _flag_name(word: str) -> str:
    """Return the name of a flag, with or without `=value`, as the tables have it."""
    return word.partition("=")[0].replace("_", "-")
