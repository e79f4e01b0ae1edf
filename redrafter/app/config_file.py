"""Read options of a command from files that `--config FILE` names, and convert them to the fields' types.

A file holds one object, in JSON or JSON5, that maps option names, with dashes or underscores, to their values:

    {"model": "my-base", "batch-size": 8, "target-layers": [8, 16, 24], "compile": true}

The command line overrides every file, and a later file overrides an earlier one.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from redrafter.app.flags import flag, metavar_of, union_arms
from redrafter.app.parser import Parser
from redrafter.errors import ArgumentError, did_you_mean, first_line

# How a message describes the value that an option of each type expects.
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Mapping: "an object"}
_JSON_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


class Option(NamedTuple):
    """A field of a dataclass of options, and its resolved type."""

    field: Field[object]
    hint: object

    @property
    def arms(self) -> tuple[object, ...]:
        """The types of a union; of another type, that alone."""
        return union_arms(self.hint)

    @property
    def element(self) -> object:
        """The type of the elements of a tuple, also of an optional one; None where the option holds one value."""
        return next((get_args(arm)[0] for arm in self.arms if get_origin(arm) is tuple), None)

    @property
    def parser(self) -> Callable[[str], Iterable[object]] | None:
        """The function that parses all elements from one word; None if the flag takes one word per element."""
        return None if self.field.metadata.get("action") == "append" else self.field.metadata.get("type")


def options_by_name(options: Iterable[type]) -> dict[str, Option]:
    """Return the fields of dataclasses of options, with their resolved types, by name."""
    return {
        field.name: Option(field, get_type_hints(dataclass)[field.name])
        for dataclass in options
        for field in fields(dataclass)
    }


class ConfigParser(Parser):
    """A parser that also reads options from the files that `--config` names; flags override the files."""

    def __init__(
        self,
        *,
        translate: Callable[[str, dict[str, object]], dict[str, object]] = lambda file, content: content,
        **kwargs: Any,
    ):
        """Create a parser; `translate` gets a file's name and content, and returns it with this parser's names."""
        super().__init__(**kwargs)
        self._translate_content = translate
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
        flags = {action.dest for action in self._actions}
        known = {name: option for name, option in options_by_name(self.option_types).items() if name in flags}
        config: dict[str, object] = {}
        for key, value in self._translate_content(file, read_object(file)).items():
            name = key.replace("-", "_")
            if name in config:
                raise ArgumentError(f"{file}: {key} is given twice")
            config[name] = convert_value(file, key, value, known)
        return config


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
    return check_object(file, document)


def check_object(file: str, document: object) -> dict[str, object]:
    """Return the parsed content of a file of options; raise `ArgumentError` if it is not an object."""
    if not isinstance(document, dict):
        raise ArgumentError(f"{file} must hold a JSON object, got a {_JSON_NAMES[type(document)]}")
    return document


def convert_value(file: str, key: str, value: object, known: Mapping[str, Option]) -> object:
    """Convert the JSON value of a key to the type of its option.

    Args:
        file: The file, as errors name it.
        key: The key: an option's name with dashes or underscores.
        value: The value.
        known: The options by name.

    Raises:
        ArgumentError: The key is unknown or the value has another type; the message suggests a correction.
    """
    name = key.replace("-", "_")
    option = known.get(name)
    if option is None:
        # Flags of options that default to true are spelled --no-X, but a file gives X itself.
        positive = name.removeprefix("no_")
        if name != positive and positive in known and known[positive].hint is bool:
            hint = f'; write "{positive}": false'
        else:
            hint = did_you_mean(name, known)
        raise ArgumentError(f"{file}: {key} is not an option of this command{hint}")
    try:
        return _convert(value, option)
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        raise ArgumentError(f"{file}: {key} must be {_expected(option)}, got {json.dumps(value)}") from None


def _convert(value: object, option: Option) -> object:
    """Convert a JSON value to the type of its option. Raises `ValueError` if the types do not match."""
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
    # A flag that takes all elements as one word, such as `--target-layers 8,16,24`, accepts that word in a file too.
    if read is not None and isinstance(value, str):
        return tuple(read(value))
    if not isinstance(value, list):
        raise ValueError
    if option.element in _EXPECTED:
        return tuple(_convert_scalar(item, (option.element,)) for item in value)
    assert read is not None, "a tuple of another type declares its parser"
    return tuple(read(",".join(str(_convert_scalar(item, (str,))) for item in value))) if value else ()


def _convert_scalar(value: object, arms: tuple[object, ...]) -> object:
    if type(value) in arms or (isinstance(value, dict) and Mapping in map(get_origin, arms)):
        return value
    # JSON writes 1 for 1.0; `type` rather than isinstance, since bool is an int.
    if float in arms and type(value) is int:
        return float(value)
    raise ValueError


def _expected(option: Option) -> str:
    """Describe the values that an option takes, for a message."""
    metadata = option.field.metadata
    if choices := metadata.get("choices"):
        return f"one of {', '.join(choices)}"
    if option.element is not None:
        plural = "whole numbers" if option.element is int else "numbers" if option.element is float else "strings"
        example = metavar_of(metadata) if option.parser else None
        return f"a list of {plural}" + (f", as for {flag(option.field.name)} {example}" if example else "")
    return " or ".join(_EXPECTED[kind] for arm in option.arms if (kind := get_origin(arm) or arm) in _EXPECTED)
