"""Files of options: how they are read, and what is said of one that cannot be."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redrafter.app.option_values import Option
from redrafter.errors import ArgumentError, did_you_mean


def read_text(file: str | Path) -> str:
    """Return the text of a file of options.

    Raises:
        ArgumentError: If it cannot be read, or holds nothing.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # no UTF-8, or a path with a null character
        raise ArgumentError(f"{file} cannot be read: {error}") from error
    if not text.strip():
        raise ArgumentError(f"{file} is empty; it must hold a JSON object, such as {{}}")
    return text


def check_object(file: str | Path, document: Any) -> dict[str, Any]:
    """Return what a file of options holds, parsed; raise `ArgumentError` unless that is an object."""
    if not isinstance(document, dict):
        raise ArgumentError(f"{file} must hold a JSON object, got a {_JSON_NAMES[type(document)]}")
    return document


def unknown_key(file: str | Path, key: str, known: dict[str, Option], aliases: Iterable[str] = ()) -> ArgumentError:
    """Return the error that names a key which is no option, with what to write in its place.

    Args:
        file: Path of the file.
        key: The key, as the file spells it.
        known: The options that the file may set, by name.
        aliases: Other names that it may use for them.
    """
    name = key.replace("-", "_")
    positive = name.removeprefix("no_")
    if name != positive and positive in known and known[positive].hint is bool:
        hint = f'; write "{positive}": false'
    else:
        hint = did_you_mean(name, [*known, *aliases])
    return ArgumentError(f"{file}: {key} is not an option of this command{hint}")


_JSON_NAMES = {list: "list", str: "text", int: "number", float: "number", bool: "truth value", type(None): "null"}
