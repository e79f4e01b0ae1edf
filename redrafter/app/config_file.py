"""Read options of a command from files that `--config FILE` names, and convert them as flags are.

A file holds one object, in JSON or JSON5, that maps option names, with dashes or underscores, to their values:

    {"model": "my-base", "batch-size": 8, "target-layers": [8, 16, 24], "compile": true}

The command line overrides every file, and a later file overrides an earlier one.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from redrafter.app.flags import add_options
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError, did_you_mean, first_line


class ConfigParser(Parser):
    """A parser that also reads options from the files that `--config` names; flags override the files."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._config: dict[str, object] = {}
        self.add_argument(
            "--config",
            type=self._load_config,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="read options from an object in JSON or JSON5 with the names of the options below as keys; flags win "
            "over the file, later files over earlier ones",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, then set options that it omits from the files."""
        self._config = {}
        parsed, unknown = super().parse_known_args(args, namespace)
        vars(parsed).pop("config", None)
        for name, value in self._config.items():
            if name not in parsed:
                setattr(parsed, name, value)
        return parsed, unknown

    def _load_config(self, path: str) -> None:
        """Store the options of a file and stop requiring their flags. An invalid file exits the program."""
        try:
            config = self.read_config(path)
        except ArgumentError as error:
            self.error(" ".join(str(error).split()))
        self._config |= config
        # argparse would still demand a required option that the file provides.
        for action in self._actions:
            action.required &= action.dest not in config

    def read_config(self, file: str) -> dict[str, object]:
        """Return the options that a file sets, by name.

        Raises:
            ArgumentError: The file cannot be read, or a key is unknown, given twice or has a value of another type.
        """
        actions = {action.dest: action for action in self._actions}
        known = {item.name: item for options in self.option_types for item in fields(options) if item.name in actions}
        config: dict[str, object] = {}
        for key, value in read_object(file).items():
            name = key.replace("-", "_")
            if name in config:
                raise ArgumentError(f"{file}: {key} is given twice")
            if name not in known:
                # Flags of options that default to true are spelled --no-X, but a file gives X itself.
                positive = known.get(name.removeprefix("no_"))
                negated = positive is not None and positive.default is True
                hint = f'; write "{name[3:]}": false' if negated else did_you_mean(name, known)
                raise ArgumentError(f"{file}: {key} is not an option of this command{hint}")
            try:
                config[name] = self._convert(value, actions[name], known[name])
            except argparse.ArgumentError as error:
                raise ArgumentError(f"{file}: {key}: {error.message}, got {json.dumps(value)}") from None
        return config

    def _convert(self, value: object, action: argparse.Action, item: Field[Any]) -> object:
        """Convert the JSON value of an option as its flag converts the words that spell it."""
        repeated, values = item.metadata.get("action") == "append", value if isinstance(value, list) else [value]
        if value is None and item.default is None:
            return None
        if action.nargs == 0:
            if isinstance(value, bool):
                return value
            raise argparse.ArgumentError(None, "write true or false")
        if action.type in (None, str):
            texts = values if repeated or action.nargs else [value]
            if not all(isinstance(text, str) for text in texts) or (action.required and not texts):
                raise argparse.ArgumentError(None, "write text")
        words = [each if isinstance(each, str) else json.dumps(each) for each in values]
        if repeated:
            return tuple(self._get_values(action, [word]) for word in words)
        if not words and isinstance(item.default, tuple):
            return ()
        return self._get_values(action, words if action.nargs else [",".join(words)])


def command_parser(prog: str, *groups: tuple[type, str, Sequence[str]]) -> ConfigParser:
    """Return the parser of a command: of each group of options their dataclass, a title and the fields without a flag.

    The docstring of the first group's dataclass describes the command.
    """
    parser = ConfigParser(prog=prog, options=groups[0][0])
    for options, title, without in groups:
        add_options(parser, options, title, without=without)
    return parser


def _without_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key} is given twice")
        content[key] = value
    return content


def read_object(file: str) -> dict[str, object]:
    """Load the object in a file of options: JSON, or also JSON5 if its package is installed.

    Raises:
        ArgumentError: The file cannot be read, is empty, or does not hold an object.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or NUL in the path
        raise ArgumentError(f"{file} cannot be read: {first_line(error)}") from error
    if not text.strip():
        raise ArgumentError(f"{file} is empty; it must hold a JSON object, such as {{}}")
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        # JSON is tried first: the json5 package is optional and slower.
        try:
            from json5 import loads

            document = loads(text, object_pairs_hook=_without_duplicates)
        except ImportError:
            raise ArgumentError(f"{file} is not JSON: {error}; for JSON5: pip install json5") from None
        except (ValueError, RecursionError) as wrong:
            raise ArgumentError(f"{file} is neither JSON nor JSON5: {wrong}") from wrong
    if not isinstance(document, dict):
        raise ArgumentError(f"{file} must hold a JSON object, got a {type(document).__name__}")
    return document
