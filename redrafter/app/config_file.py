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

from redrafter.app.option_values import Option, convert_value, options_by_name
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError
from redrafter.spelling import nearest

__all__ = ["ConfigParser"]


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
            raise ArgumentError(f"{path}: {key} is not an option of this command{_suggestion(name, known)}")
        if name in config:
            raise ArgumentError(f"{path}: {key} is given twice")
        config[name] = convert_value(path, key, value, known[name])
    return config


def _load_object(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{path} (--config) cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # no UTF-8, or a path with a null character
        raise ArgumentError(f"{path!s} (--config) cannot be read: {error}") from error
    if not text.strip():
        raise ArgumentError(f"{path} (--config) is empty; it must hold a JSON object, such as {{}}")
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} (--config) is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArgumentError(f"{path} (--config) must hold a JSON object, got a {_JSON_NAMES[type(document)]}")
    return document


_JSON_NAMES = {list: "list", str: "text", int: "number", float: "number", bool: "truth value", type(None): "null"}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object. Raises `ValueError` for a key that it gives twice."""
    for index, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:index]):
            raise ValueError(f"{key} is given twice")
    return dict(pairs)


def _suggestion(name: str, known: dict[str, Option]) -> str:
    """Return what to write in place of an unknown key, as the end of a message."""
    positive = name.removeprefix("no_")
    if name != positive and positive in known and known[positive].hint is bool:
        return f'; write "{positive}": false'
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""
