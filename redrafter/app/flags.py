"""Command-line flags from the fields of a dataclass, so that a default and its help stand in one place.

A field is declared with `option(default, help, ...)`. Its flag is its name with dashes; `bool` fields become switches,
`--no-...` where the default is true; `tuple` fields take one or more words unless a `type` reads them from one word.
"""

import argparse
import os
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "add_options",
    "biases",
    "flag",
    "floats",
    "integers",
    "names",
    "option",
    "own_name",
    "read_options",
    "shown",
    "shown_command",
    "temperatures",
    "yes_or_no",
]

T = TypeVar("T")

_METAVARS = {int: "N", float: "X"}


def option(default: Any, help: str, **argument: Any) -> Any:
    """A field with a default and its help. argument: more for `add_argument`, such as choices, metavar, type,
    required; and path=True for what names a file or a directory."""
    return field(default=default, metadata={"help": help, **argument})


def integers(text: str) -> tuple[int, ...]:
    """ "1,2,4" as numbers."""
    return tuple(int(number) for number in text.split(","))


def floats(text: str) -> tuple[float, ...]:
    """ "0,0.7" as numbers."""
    return tuple(float(number) for number in text.split(","))


def temperatures(text: str) -> float | tuple[float, ...]:
    """Read "0.7" as a number, "0.7,0.2" as one for each prompt."""
    found = floats(text)
    return found if len(found) > 1 else found[0]


def biases(text: str) -> dict[int, float]:
    """Read "50256=-100,11=2.5" as numbers by token id."""
    try:
        pairs = [(int(token), float(bias)) for token, bias in (pair.split("=") for pair in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write token ids and numbers, such as 11=-100,42=2.5, not {text!r}") from None
    return dict(pairs)


def yes_or_no(text: str) -> bool:
    """Read true or false, in any case."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"write True or False, not {text!r}")
    return text.lower() == "true"


def names(text: str) -> tuple[str, ...]:
    """ "a,b" as names."""
    return tuple(name.strip() for name in text.split(","))


def flag(name: str) -> str:
    """`batch_size` as `--batch-size`."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_options(
    parser: argparse.ArgumentParser,
    options: type,
    title: str,
    *,
    without: Sequence[str] = (),
    types: Mapping[str, Callable[[str], Any]] | None = None,
) -> None:
    """Add a flag for every field of a dataclass of options, but for those in `without`. types: what reads a field's
    word in this command, by the field's name, where that is not what reads it elsewhere."""
    group, hints = parser.add_argument_group(title), get_type_hints(options)
    for each in (each for each in fields(options) if each.name not in without):
        argument = {key: value for key, value in each.metadata.items() if key != "path"}
        negated = each.default is True
        kind = _plain(hints[each.name])
        if kind is bool and "type" not in argument:
            argument["action"] = "store_false" if negated else "store_true"
        else:
            if get_origin(kind) is tuple and "type" not in argument:
                argument = {"nargs": "+", "metavar": each.name.upper()} | argument
            elif kind in _METAVARS:
                argument.setdefault("type", kind)
            if each.default not in (None, ()):
                argument["help"] += f" (default: {shown(each.default)})"
            if argument.get("type") in _METAVARS:
                argument["metavar"] = _METAVARS[argument["type"]]
            argument["type"] = (types or {}).get(each.name, argument.get("type"))
        name = flag(("no_" if negated else "") + each.name)
        group.add_argument(name, dest=each.name, default=argparse.SUPPRESS, **argument)


def read_options(options: type[T], args: argparse.Namespace) -> T:
    """The dataclass from what was typed; what was not keeps its default."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    return options(**{each.name: given[each.name] for each in fields(options) if each.name in given})  # type: ignore


def shown_command(words: Sequence[str], options: Any) -> str:
    """The command line of a dataclass of options, defaults left out and files without their folders."""
    found = list(words)
    for each in fields(options):
        value = getattr(options, each.name)
        if value == each.default:
            continue
        if isinstance(value, bool):
            found.append(flag(each.name if value else f"no_{each.name}"))
        elif isinstance(value, tuple) and "type" in each.metadata:
            found += [flag(each.name), shown(value)]
        else:
            found += [
                flag(each.name),
                *(_short(each, one) for one in (value if isinstance(value, tuple) else (value,))),
            ]
    return shlex.join(found)


def _plain(hint: Any) -> Any:
    """`int | None` to `int`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(arm for arm in get_args(hint) if arm is not type(None))
    return hint


def _short(item: Field[Any], value: Any) -> str:
    if item.metadata.get("path"):
        return os.path.basename(os.path.abspath(value))
    return own_name(value) if item.name == "model" else shown(value)


def own_name(place: str) -> str:
    """A file or directory without what is above it; a hub id as it is."""
    there = os.path.isabs(place) or os.path.exists(place)
    return os.path.basename(os.path.abspath(place)) if there else place
