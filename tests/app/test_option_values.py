"""Values of options in JSON files, as `train --config` and `serve --config` both read them."""

import json
from dataclasses import dataclass

import pytest

from redrafter.app.config_file import ConfigParser
from redrafter.app.flags import add_options, integers
from redrafter.errors import ArgumentError, how_to_install
from redrafter.options import help_texts, option
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import KEY_VARIABLE, OPERATOR_KEY_VARIABLE
from redrafter.train.config import DEFAULT_LENGTH, FURTHER_LR, LOW_RANK_LR, NEW_LR, TrainConfig


@dataclass(frozen=True)
class Options:
    count: int = option(1, "a count")
    share: float | None = option(None, "a share")
    name: str | None = option(None, "a name")
    fast: bool = option(False, "a switch")
    mode: str = option("a", "a mode", choices=("a", "b"))
    layers: tuple[int, ...] = option((), "layers", type=integers)
    keys: tuple[str, ...] = option((), "keys", action="append", type=str, metavar="KEY")
    files: tuple[str, ...] = option((), "files", required=True)


def read(tmp_path, key: str, value: object) -> object:
    parser = ConfigParser(prog="redrafter test")
    add_options(parser, Options, "options")
    (tmp_path / "c.json").write_text(json.dumps({key: value}))
    return parser.read_config(str(tmp_path / "c.json"))[key]


@pytest.mark.parametrize(
    ("key", "value", "converted"),
    [
        ("count", 3, 3),
        ("share", 1, 1.0),
        ("share", None, None),
        ("fast", True, True),
        ("mode", "b", "b"),
        ("layers", [1, 2], (1, 2)),
        ("layers", "1,2", (1, 2)),
        ("layers", [], ()),
        ("keys", ["key", "another"], ("key", "another")),
        ("keys", [], ()),
        ("files", ["x"], ["x"]),
    ],
)
def test_a_value_becomes_what_its_flag_makes_of_it(tmp_path, key, value, converted):
    assert repr(read(tmp_path, key, value)) == repr(converted)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("count", "three", "invalid int value: 'three'"),
        ("count", True, "invalid int value: 'true'"),
        ("count", 3.0, "invalid int value: '3.0'"),
        ("count", None, "invalid int value: 'null'"),
        ("count", [], "invalid int value: ''"),
        ("share", {}, "invalid float value: '{}'"),
        ("name", True, "write text"),
        ("name", ["a", "b"], "write text"),
        ("fast", 1, "write true or false"),
        ("mode", "c", "invalid choice: 'c' (choose from"),
        ("layers", "1,x", "invalid integers value: '1,x'"),
        ("keys", [1], "write text"),
        ("files", [], "write text"),
        ("files", None, "write text"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_wrong(tmp_path, key, value, problem):
    with pytest.raises(ArgumentError) as refusal:
        read(tmp_path, key, value)
    assert f"c.json: {key}: {problem}" in str(refusal.value)
    assert str(refusal.value).endswith(f", got {json.dumps(value)}")


def test_help_texts_spell_the_values_of_the_code():
    texts = help_texts(TrainConfig) | help_texts(ServeOptions)
    assert f"(default: {DEFAULT_LENGTH}, or" in texts["length"]
    assert f"(default: {NEW_LR:g}; with --drafter {FURTHER_LR:g}, or {LOW_RANK_LR:g} with" in texts["lr"]
    assert KEY_VARIABLE in texts["api_key"]
    assert OPERATOR_KEY_VARIABLE in texts["operator_key"]
    assert how_to_install("serve,otel") in texts["otlp_traces_endpoint"]
