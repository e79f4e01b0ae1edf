"""Build command-line flags from dataclass fields, so that each default and help text is written once.

A field is declared with `option(default, help, ...)`. Its flag is its name with dashes. A `bool` field becomes a
switch, named `--no-...` when the default is true. A `tuple` field takes one or more words, unless its `type` parses one
word.
"""

import argparse
import json
import os
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from redrafter.errors import ArgumentError
from redrafter.options import help_texts
from redrafter.options import option as option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from redrafter.app.parser import Parser

T = TypeVar("T")

Types: TypeAlias = Mapping[str, Callable[[str], object]]  # what parses the words of a flag, by its option
_NOT_ARGPARSE = ("path", "names", "commands", "check", "positional")  # metadata that `add_argument` does not take


def integers(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers, such as "1,2,4"."""
    return tuple(int(number) for number in text.split(","))


def floats(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers, such as "0,0.7"."""
    return tuple(float(number) for number in text.split(","))


def temperatures(text: str) -> float | tuple[float, ...]:
    """Parse one temperature ("0.7") as a number, or one for each prompt ("0.7,0.2") as a tuple."""
    values = floats(text)
    return values if len(values) > 1 else values[0]


def biases(text: str) -> dict[int, float]:
    """Parse biases by token id, such as "50256=-100,11=2.5"."""
    try:
        pairs = [(int(token), float(bias)) for token, bias in (pair.split("=") for pair in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write token ids and numbers, such as 11=-100,42=2.5, not {text!r}") from None
    return dict(pairs)


def yes_or_no(text: str) -> bool:
    """Parse true or false, in upper or lower case."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"write True or False, not {text!r}")
    return text.lower() == "true"


def names(text: str) -> tuple[str, ...]:
    """Parse comma-separated names, such as "a,b"."""
    return tuple(name.strip() for name in text.split(","))


# What a value is called in help texts, by its `type` or by `names`, the check of it.
_METAVARS: Mapping[object, str] = {
    **{int: "N", float: "X", integers: "N,...", floats: "X,..."},
    **dict.fromkeys(("file", "template", "new file"), "FILE"),
    **dict.fromkeys(("checkpoint", "suite", "tokenizer"), "DIR"),
    **{"picture": "FILE.png", "adapter": "PATH", "model": "M", "drafter": "D", "drafter or current": "D"},
}


def metavar_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of an option's value in help texts; None for the name of the option itself."""
    found = (_METAVARS.get(metadata.get(key)) for key in ("type", "names"))
    return metadata.get("metavar") or next(filter(None, found), None)


def flag(name: str) -> str:
    """Return the flag of a field: `--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")


def union_arms(hint: object) -> tuple[Any, ...]:
    """Return the member types of a union, or a tuple of the type itself if it is not a union."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def format_value(value: object) -> str:
    """Format an option's value as a command line spells it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_options(
    parser: "Parser", options: type, title: str, *, without: Sequence[str] = (), types: Types | None = None
) -> None:
    """Add a flag for each field of a dataclass to a parser, inherited fields last, under a title in `--help`.

    Fields named in `without` get no flag. `types` maps field names to parsers that replace the field's own `type` for
    this command.
    """
    parser.option_types.append(options)
    group = parser.add_argument_group(title) if title else parser
    hints, texts = get_type_hints(options), help_texts(options)
    inherited = {item.name for base in options.__mro__[1:] if is_dataclass(base) for item in fields(base)}
    command = parser.prog.rpartition(" ")[2]
    # dataclass fields list inherited ones first, but a command's own options should lead its help.
    for item in sorted(fields(options), key=lambda item: item.name in inherited):
        if item.name in without or command not in item.metadata.get("commands", command):
            continue
        argument = {key: value for key, value in item.metadata.items() if key not in _NOT_ARGPARSE}
        argument["help"] = texts.get(item.name, "")  # Python leaves docstrings out with -OO
        negated = item.default is True
        kind = next(arm for arm in union_arms(hints[item.name]) if arm is not type(None))
        if kind is bool and "type" not in argument:
            argument["action"] = "store_false" if negated else "store_true"
            argument["help"] = ("do not " if negated else "") + argument["help"]
        else:
            if get_origin(kind) is tuple and "type" not in argument:
                argument = {"nargs": "+", "metavar": item.name.upper()} | argument
            elif kind in (int, float):
                argument.setdefault("type", kind)
            if item.default not in (None, ()):
                argument["help"] += f" (default: {format_value(item.default)})"
            argument.setdefault("metavar", metavar_of(item.metadata | argument))
            argument["type"] = (types or {}).get(item.name, argument.get("type"))
        if "positional" not in item.metadata:
            argument["dest"] = item.name
        name = item.name if "positional" in item.metadata else flag(("no_" if negated else "") + item.name)
        # SUPPRESS: a flag that was not typed is absent, so that config files and defaults can follow.
        group.add_argument(name, default=argparse.SUPPRESS, **argument)


def read_options(options: type[T], args: argparse.Namespace) -> T:
    """Create a dataclass of options from parsed arguments; omitted flags keep their defaults.

    Raises `ArgumentError` for an empty text, which is no value of any option, and the errors of the dataclass.
    """
    values = {}
    for item in fields(options):  # type: ignore[arg-type]
        value = vars(args).get(item.name, item.default)
        if (value == "" or (isinstance(value, list) and "" in value)) and "positional" not in item.metadata:
            raise ArgumentError(f"{flag(item.name)} needs a value, got an empty one")
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def format_command(words: Sequence[str], options: "DataclassInstance") -> str:
    """Format options as a command line starting with `words`; omits defaults and shortens paths to file names."""
    line, values = list(words), vars(options)
    for item in fields(options):
        value = values[item.name]
        if value == item.default:
            continue
        if isinstance(value, bool):
            line.append(flag(item.name if value else f"no_{item.name}"))
        elif isinstance(value, tuple) and "type" in item.metadata:
            line += [flag(item.name), format_value(value)]
        else:
            parts = value if isinstance(value, tuple) else (value,)
            # Without folders, since the command is published in model cards.
            if item.name == "model":
                parts = (short_name(value),)
            elif is_path(item):
                parts = tuple(os.path.basename(os.path.abspath(part)) for part in parts)
            line += [flag(item.name), *map(format_value, parts)]
    return shlex.join(line)


def is_path(item: Field[Any]) -> bool:
    """Return whether an option names a file or a directory."""
    return bool(item.metadata.get("path", "names" in item.metadata))


def short_name(path: str) -> str:
    """Return the last part of a path to a file or directory; a hub id is returned unchanged."""
    is_path = os.path.isabs(path) or os.path.exists(path)
    return os.path.basename(os.path.abspath(path)) if is_path else path
