"""Values of options in JSON files, as `train --config` and `serve --config` both read them."""

import json
from dataclasses import dataclass

import pytest

from redrafter.app.config_file import convert_value, options_by_name
from redrafter.app.flags import integers
from redrafter.errors import ArgumentError
from redrafter.options import option


@dataclass(frozen=True)
class Options:
    count: int = option(1, "a count")
    share: float | None = option(None, "a share")
    name: str | int | None = option(None, "a name or a number")
    fast: bool = option(False, "a switch")
    mode: str = option("a", "a mode", choices=("a", "b"))
    layers: tuple[int, ...] = option((), "layers", type=integers, metavar="N,...")
    keys: tuple[str, ...] = option((), "keys", action="append", type=str, metavar="KEY")
    files: tuple[str, ...] = option((), "files", required=True)


OPTIONS = options_by_name([Options])


@pytest.mark.parametrize(
    ("key", "value", "converted"),
    [
        ("count", 3, 3),
        ("share", 1, 1.0),
        ("share", None, None),
        ("name", 5, 5),
        ("fast", True, True),
        ("mode", "b", "b"),
        ("layers", [1, 2], (1, 2)),
        ("layers", "1,2", (1, 2)),
        ("keys", ["key", "another"], ("key", "another")),
        ("keys", [], ()),
        ("files", ["x"], ("x",)),
    ],
)
def test_a_value_becomes_what_its_option_holds(key, value, converted):
    assert repr(convert_value("c.json", key, value, OPTIONS)) == repr(converted)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("count", "3", "a whole number"),
        ("count", True, "a whole number"),
        ("count", 3.0, "a whole number"),
        ("count", None, "a whole number"),
        ("share", "1", "a number"),
        pytest.param("share", 10**400, "a number", id="share-more than a float can hold"),
        ("name", True, "a string or a whole number"),
        ("fast", 1, "true or false"),
        ("mode", "c", "one of a, b"),
        ("layers", "1,x", "a list of whole numbers, as for --layers N,..."),
        ("layers", 1, "a list of whole numbers, as for --layers N,..."),
        ("keys", "key", "a list of strings"),
        ("keys", [1], "a list of strings"),
        ("files", [], "a list of strings"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_expected(key, value, expected):
    with pytest.raises(ArgumentError) as refusal:
        convert_value("c.json", key, value, OPTIONS)
    assert str(refusal.value) == f"c.json: {key} must be {expected}, got {json.dumps(value)}"
