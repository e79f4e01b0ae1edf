"""Values of options in JSON files, converted to what the options' dataclasses hold."""

import argparse
import json
import types
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from redrafter.app.flags import flag
from redrafter.errors import ArgumentError

# What a value must be, in a message, by the type of the option.
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class Option(NamedTuple):
    """A field of a dataclass of options, and its resolved type."""

    field: Field[Any]
    hint: Any


def options_by_name(options: Iterable[type]) -> dict[str, Option]:
    """Return the fields of dataclasses of options, with their resolved types, by name."""
    return {
        field.name: Option(field, get_type_hints(dataclass)[field.name])
        for dataclass in options
        for field in fields(dataclass)
    }


def convert_value(file: str | Path, key: str, value: Any, option: Option) -> Any:
    """Convert the JSON value of a key to what its option holds.

    Args:
        file: Path of the file that gives the value.
        key: The option's name, as the file spells it.
        value: The value, as `json.loads` gives it.
        option: The option.

    Raises:
        ArgumentError: If the value is of another type, naming the file, the key and what is expected.
    """
    try:
        return _convert(value, option)
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        raise ArgumentError(f"{file}: {key} must be {_expected(option)}, got {json.dumps(value)}") from None


def _convert(value: Any, option: Option) -> Any:
    """Convert a JSON value to what its option holds. Raises `ValueError` where it is of another type."""
    arms = _union_arms(option.hint)
    if option.field.metadata.get("required") and value in (None, []):
        raise ValueError
    if value is None and type(None) in arms:
        return None
    choices = option.field.metadata.get("choices")
    if choices and isinstance(value, str):
        value = option.field.metadata.get("type", str)(value)
    if choices and value not in choices:
        raise ValueError
    if any(get_origin(arm) is tuple for arm in arms):
        return _convert_tuple(value, option)
    return _convert_scalar(value, arms)


def _convert_scalar(value: Any, arms: tuple[Any, ...]) -> Any:
    if type(value) in arms:
        return value
    if float in arms and type(value) is int:
        return float(value)
    raise ValueError


def _convert_tuple(value: Any, option: Option) -> tuple[Any, ...]:
    """Convert the JSON value of an option that holds several elements to a tuple.

    If the option's flag takes all elements as one word, such as `--target-layers 8,16,24`, the value may also be that
    word, as a JSON string.

    Args:
        value: The value that a config file gives: a list or, with such a flag, a string.
        option: The option, whose type hint says what the elements are.

    Returns:
        The elements, each of the type that the hint names.

    Raises:
        ValueError: If the value is neither, or an element has another type.
    """
    read = _parser(option)
    if read is not None and isinstance(value, str):
        return tuple(read(value))
    if not isinstance(value, list):
        raise ValueError
    element = _element(option.hint)
    if element in _EXPECTED:
        return tuple(_convert_scalar(item, (element,)) for item in value)
    assert read is not None, "a tuple of a class of ours has a function that reads it"
    return tuple(read(",".join(_convert_scalar(item, (str,)) for item in value))) if value else ()


def _parser(option: Option) -> Callable[[str], Any] | None:
    """Return what reads all elements of an option from one word; None where its flag takes an element a word."""
    return None if option.field.metadata.get("action") == "append" else option.field.metadata.get("type")


def _expected(option: Option) -> str:
    """Describe the values that an option takes, for a message."""
    choices = option.field.metadata.get("choices")
    if choices:
        return f"one of {', '.join(choices)}"
    if any(get_origin(arm) is tuple for arm in _union_arms(option.hint)):
        plural = {int: "whole numbers", float: "numbers"}.get(_element(option.hint), "texts")
        example = option.field.metadata.get("metavar") if _parser(option) else None
        return f"a list of {plural}" + (f", as for {flag(option.field.name)} {example}" if example else "")
    return " or ".join(_EXPECTED[arm] for arm in _union_arms(option.hint) if arm in _EXPECTED)


def _union_arms(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; of another type, that alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _element(hint: Any) -> Any:
    """Return the type of the elements of a tuple, also of an optional one."""
    return next(get_args(arm)[0] for arm in _union_arms(hint) if get_origin(arm) is tuple)
