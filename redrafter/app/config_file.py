"""Options of a command from JSON files, which `--config FILE` names, converted to what the options' dataclasses hold.

A file holds one object. Its keys are the options' names with dashes or underscores, its values what the options take:

    {"model": "my-base", "batch-size": 8, "target-layers": [8, 16, 24], "compile": true}

What is typed on the command line wins over every file, and a later file over an earlier one.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from redrafter.app.flags import flag, union_arms
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError, did_you_mean

# What a value must be, in a message, by the type of the option.
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_JSON_NAMES = {list: "list", str: "text", int: "number", float: "number", bool: "truth value", type(None): "null"}


class Option(NamedTuple):
    """A field of a dataclass of options, and its resolved type."""

    field: Field[Any]
    hint: Any

    @property
    def arms(self) -> tuple[Any, ...]:
        """The types of a union; of another type, that alone."""
        return union_arms(self.hint)

    @property
    def element(self) -> Any:
        """The type of the elements of a tuple, also of an optional one; None where the option holds one value."""
        return next((get_args(arm)[0] for arm in self.arms if get_origin(arm) is tuple), None)

    @property
    def parser(self) -> Callable[[str], Any] | None:
        """What reads all elements of an option from one word; None where its flag takes an element a word."""
        return None if self.field.metadata.get("action") == "append" else self.field.metadata.get("type")


def options_by_name(options: Iterable[type]) -> dict[str, Option]:
    """Return the fields of dataclasses of options, with their resolved types, by name."""
    return {
        field.name: Option(field, get_type_hints(dataclass)[field.name])
        for dataclass in options
        for field in fields(dataclass)
    }


class ConfigParser(Parser):
    """A parser that also reads options from the JSON files that `--config` names; what is typed wins over them."""

    def __init__(self, *, options: Iterable[type], **kwargs: Any):
        """Make a parser for the options of dataclasses, whose flags `add_options` adds."""
        super().__init__(**kwargs)
        self._options = options_by_name(options)
        self._config: dict[str, Any] = {}
        self.add_argument(
            "--config",
            type=self._load_config,
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="read options from a JSON object with the names of the options below as keys; flags win over the "
            "file, later files over earlier ones",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, then fill in from the files what it leaves out."""
        self._config = {}
        parsed, unknown = super().parse_known_args(args, namespace)
        vars(parsed).pop("config", None)
        for name, value in self._config.items():
            if not hasattr(parsed, name):
                setattr(parsed, name, value)
        return parsed, unknown

    def _load_config(self, path: str) -> None:
        """Remember the options of a file, which need not be typed any more. A mistake in it ends the program."""
        flags = {action.dest: action for action in self._actions}
        known = {name: option for name, option in self._options.items() if name in flags}
        config: dict[str, Any] = {}
        try:
            for key, value in read_object(path).items():
                name = key.replace("-", "_")
                if name in config:
                    raise ArgumentError(f"{path}: {key} is given twice")
                config[name] = convert_value(path, key, value, known)
        except ArgumentError as error:
            self.error(" ".join(str(error).split()))
        self._config |= config
        for name in config:
            flags[name].required = False


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for index, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:index]):
            raise ValueError(f"{key} is given twice")
    return dict(pairs)


def read_object(file: str | Path, *, json5: bool = False) -> dict[str, Any]:
    """Return the object that a file of options holds, in JSON, or else in JSON5 where that is allowed and installed.

    Raises:
        ArgumentError: It cannot be read, holds nothing, or something else than an object.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no UTF-8, or a path with a null character
        raise ArgumentError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise ArgumentError(f"{file} is empty; it must hold a JSON object, such as {{}}")
    try:
        document = json.loads(text, object_pairs_hook=None if json5 else _without_duplicates)
    except (ValueError, RecursionError) as error:
        if not json5:
            raise ArgumentError(f"{file} is not JSON: {error}") from error
        try:
            from json5 import loads

            document = loads(text)
        except ImportError:
            raise ArgumentError(f"{file} is not JSON; for JSON5: pip install json5") from None
        except (ValueError, RecursionError) as wrong:
            raise ArgumentError(f"{file} is neither JSON nor JSON5: {wrong}") from wrong
    return check_object(file, document)


def check_object(file: str | Path, document: Any) -> dict[str, Any]:
    """Return what a file of options holds, parsed; raise `ArgumentError` unless that is an object."""
    if not isinstance(document, dict):
        raise ArgumentError(f"{file} must hold a JSON object, got a {_JSON_NAMES[type(document)]}")
    return document


def convert_value(
    file: str | Path, key: str, value: Any, known: Mapping[str, Option], aliases: Mapping[str, str] | None = None
) -> Any:
    """Convert the JSON value of a file's key to what its option holds.

    Args:
        file: The file, as errors name it.
        key: The key: an option's name with dashes or underscores, or an alias.
        value: The value.
        known: The options by name.
        aliases: Names of options by their aliases.

    Raises:
        ArgumentError: The key is no option, or the value of another type; it says what may be meant.
    """
    aliases = aliases or {}
    name = key.replace("-", "_")
    option = known.get(aliases.get(name, name))
    if option is None:
        positive = name.removeprefix("no_")
        if name != positive and positive in known and known[positive].hint is bool:
            hint = f'; write "{positive}": false'
        else:
            hint = did_you_mean(name, [*known, *aliases])
        raise ArgumentError(f"{file}: {key} is not an option of this command{hint}")
    try:
        return _convert(value, option)
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        raise ArgumentError(f"{file}: {key} must be {_expected(option)}, got {json.dumps(value)}") from None


def _convert(value: Any, option: Option) -> Any:
    """Convert a JSON value to what its option holds. Raises `ValueError` where it is of another type."""
    metadata, read = option.field.metadata, option.parser
    if metadata.get("required") and value in (None, []):
        raise ValueError
    if value is None and type(None) in option.arms:
        return None
    if choices := metadata.get("choices"):
        value = metadata.get("type", str)(value) if isinstance(value, str) else value
        if value not in choices:
            raise ValueError
    if option.element is None:
        return _convert_scalar(value, option.arms)
    # Where a flag takes all elements as one word, such as `--target-layers 8,16,24`, a file may hold that word too.
    if read is not None and isinstance(value, str):
        return tuple(read(value))
    if not isinstance(value, list):
        raise ValueError
    if option.element in _EXPECTED:
        return tuple(_convert_scalar(item, (option.element,)) for item in value)
    assert read is not None, "a tuple of a class of ours has a function that reads it"
    return tuple(read(",".join(_convert_scalar(item, (str,)) for item in value))) if value else ()


def _convert_scalar(value: Any, arms: tuple[Any, ...]) -> Any:
    if type(value) in arms:
        return value
    if float in arms and type(value) is int:
        return float(value)
    raise ValueError


def _expected(option: Option) -> str:
    """Describe the values that an option takes, for a message."""
    metadata = option.field.metadata
    if choices := metadata.get("choices"):
        return f"one of {', '.join(choices)}"
    if option.element is not None:
        plural = {int: "whole numbers", float: "numbers"}.get(option.element, "texts")
        example = metadata.get("metavar") if option.parser else None
        return f"a list of {plural}" + (f", as for {flag(option.field.name)} {example}" if example else "")
    return " or ".join(_EXPECTED[arm] for arm in option.arms if arm in _EXPECTED)
