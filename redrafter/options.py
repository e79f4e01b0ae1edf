"""Declare options: dataclass fields with the help text of their flag and a check of their values."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from redrafter.errors import ArgumentError

Check = Callable[[object], str | None]
"""Returns what a value must be, such as "a positive integer", for an invalid value; None for a valid one."""

_DTYPE_WORDS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


def dtype_word(text: str) -> str:
    """Return the name of a number format without torch's prefix: `float16` for `half`, `fp16` and `torch.float16`."""
    word = text.strip().lower().removeprefix("torch.")
    return _DTYPE_WORDS.get(word, word)


def option(default: object, help: str | None = None, **argument: object) -> Any:
    """Declare a dataclass field that is also a command-line flag and a key of config files.

    A field without any of the arguments needs no declaration: its plain default does.

    Args:
        default: Default of the field and of the flag.
        help: Help text, where it is computed; others are entries of `Attributes` in the docstring of the class.
        argument: Further arguments of `ArgumentParser.add_argument`, such as `choices`, `metavar`, `type`, `required`;
            `names`, the check of `redrafter.app.paths` for a file or a directory that it names; `path=True` for one
            without such a check; `positional=True` for a word without a flag; `commands`, names of the commands with
            the flag, if not all of them; and `check`, a `Check` of its value for `check_values`.
    """
    return field(default=default, metadata=argument if help is None else {"help": help, **argument})


def help_texts(options: type) -> dict[str, str]:
    """Return the help texts of a dataclass's fields: their entries under `Attributes`, in its docstring or its bases'.

    The text of a field that is true by default begins with a verb, as that of its flag `--no-...` is derived from it.
    """
    texts: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", listed, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts | {item.name: item.metadata["help"] for item in fields(options) if "help" in item.metadata}


def command_texts(options: type) -> dict[str, str]:
    """Return the description and the examples of a command: the docstring of its options up to `Attributes`."""
    text = inspect.cleandoc(options.__doc__ or "").partition("\n\nAttributes:")[0]
    description, _, examples = text.partition("\n\nExamples:")
    return {"description": description, "epilog": examples and "examples:" + examples.replace("\n    ", "\n  ")}


def check_values(options: Any, shown: Callable[[str], str] = str) -> None:
    """Raise `ArgumentError` for an option whose value is not allowed by its declaration.

    A value is invalid if its `check` refuses it, if it is not among its `choices`, or if it is no bool where the
    default is one. Fields of a subclass are checked too if they declare a `check` or a bool. `shown` returns the name
    of a field in messages.
    """
    for item in fields(options):
        value, choices, must_be = getattr(options, item.name), item.metadata.get("choices"), None
        if check := item.metadata.get("check"):
            must_be = check(value)
        elif isinstance(item.default, bool) and not isinstance(value, bool):
            must_be = "True or False"
        elif choices and value not in (item.default, *choices):
            must_be = f"one of {', '.join(choices)}"
        if must_be is not None:
            raise ArgumentError(f"{shown(item.name)} must be {must_be}, got {value!r}")


def whole(least: int, *, optional: bool = False) -> Check:
    """Return the check of an integer of at least `least`; with `optional`, None is valid too."""
    named = {0: "an integer of 0 or more", 1: "a positive integer"}
    must_be = named.get(least, f"an integer of {least} or more, and below 2**31")

    def check(value: object) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31
        return None if fits or (optional and value is None) else must_be

    return check


def between(least: float, most: float) -> Check:
    """Return a check of a number, or of several: each is from `least` to `most`, or None."""
    must_be = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most}"

    def check(value: Any) -> str | None:
        numbers = value if isinstance(value, list | tuple) else (value,)
        return None if all(number is None or least <= number <= most for number in numbers) else must_be

    return check


def share(value: object) -> str | None:
    """Check that a value is a number above 0 and at most 1."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return None if fits else "above 0 and at most 1"
