"""Options of a command from JSON files, which `--config FILE` names.

A file holds one object. Its keys are the options' names with dashes or underscores, its values what the options take:

    {"model": "my-base", "batch-size": 8, "target-layers": [8, 16, 24], "compile": true}

What is typed on the command line wins over every file, and a later file over an earlier one.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redrafter.app.option_files import check_object, read_text, unknown_key
from redrafter.app.option_values import Option, convert_value, options_by_name
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError


class ConfigParser(Parser):
    """A parser that also reads options from the JSON files that `--config` names; what is typed wins over them.

    Args:
        options: Dataclasses of the command's options, whose flags `add_options` adds.
    """

    def __init__(self, *, options: Iterable[type], **kwargs: Any):
        super().__init__(**kwargs)
        self._options = options_by_name(options)
        self._config: dict[str, Any] = {}
        self.add_argument(
            "--config",
            action=_ReadConfig,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="read options from a JSON object with the names of the options below as keys; flags win over the "
            "file, later files over earlier ones",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, then fill in from the files what it leaves out."""
        self._config = {}
        parsed, unknown = super().parse_known_args(args, namespace)
        for name, value in self._config.items():
            if not hasattr(parsed, name):
                setattr(parsed, name, value)
        return parsed, unknown

    def load_config(self, path: str) -> None:
        """Remember the options of a file, which need not be typed any more. A mistake in it ends the program."""
        flags = {action.dest: action for action in self._actions}
        known = {name: option for name, option in self._options.items() if name in flags}
        try:
            self._config |= _read(path, known)
        except ArgumentError as error:
            self.error(" ".join(str(error).split()))
        for name in self._config:
            flags[name].required = False


class _ReadConfig(argparse.Action):
    """The action of `--config FILE`: read the file into the parser."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        assert isinstance(parser, ConfigParser)
        parser.load_config(values)


def _read(path: str | Path, known: dict[str, Option]) -> dict[str, Any]:
    """Read the options of a file, where `known` are those that the command takes."""
    config: dict[str, Any] = {}
    for key, value in _load_object(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown_key(path, key, known)
        if name in config:
            raise ArgumentError(f"{path}: {key} is given twice")
        config[name] = convert_value(path, key, value, known[name])
    return config


def _load_object(path: str | Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from error
    return check_object(path, document)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object. Raises `ValueError` for a key that it gives twice."""
    for index, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:index]):
            raise ValueError(f"{key} is given twice")
    return dict(pairs)
