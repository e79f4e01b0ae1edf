"""Options from JSON files: what they may say, what wins over them, and the recipes that ship as such files."""

import json
from pathlib import Path

import pytest

from helpers.command_line import fails
from redrafter.train.config import TrainConfig, parse
from redrafter.train.regenerate.config import RegenerateConfig
from redrafter.train.regenerate.config import parse as parse_regenerate

RECIPES = sorted((Path(__file__).parents[2] / "train" / "recipes").glob("*.json"))
TYPED = ["--model", "m", "--data", "x.jsonl", "--output", "o"]


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_config(recipe):
    config = parse(["--data", "x.jsonl", "--output", "o", "--model", "m", "--config", str(recipe)])
    values = {key.replace("-", "_"): value for key, value in json.loads(recipe.read_text()).items()}
    assert set(values) <= set(TrainConfig.__dataclass_fields__)
    for name, value in (values | {"model": "m"}).items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("place", [0, len(TYPED)])
def test_what_is_typed_wins_over_files_and_later_files_over_earlier_ones(tmp_path, place):
    first = write(tmp_path / "first.json", {"lr": 0.5, "batch-size": 3, "pack": False, "seed": 1})
    second = write(tmp_path / "second.json", {"lr": 0.25, "batch_size": 4, "model": "other", "minutes": None})
    words = [*TYPED, "--batch-size", "7"]
    config = parse([*words[:place], "--config", first, f"--config={second}", *words[place:]])
    expected = TrainConfig(model="m", data=("x.jsonl",), output="o", lr=0.25, batch_size=7, pack=False, seed=1)
    assert config == expected


def test_a_file_may_say_all_that_must_be_said(tmp_path):
    whole = write(
        tmp_path / "whole.json",
        {"model": "m", "data": ["x.jsonl"], "output": "o", "target-layers": [1, 3], "lr": 1},
    )
    config = parse(["--config", whole])
    assert (config.data, config.target_layers) == (("x.jsonl",), (1, 3))
    assert isinstance(config.lr, float)
    assert parse(TYPED).lr == TrainConfig.lr
    rows = write(tmp_path / "rows.json", {"model": "m", "data": ["x"], "output": "o", "temperatures": [0, 0.5]})
    assert parse_regenerate(["--config", rows, "--top-k", "9"]) == RegenerateConfig(
        model="m", data=("x",), output="o", temperatures=(0.0, 0.5), top_k=9
    )


REFUSED = {  # what is JSON and of another type: tests/app/test_option_values.py
    '{"batch-sise": 8}': "batch-sise is not an option of this command; did you mean batch_size?",
    '{"no-pack": true}': 'no-pack is not an option of this command; write "pack": false',
    '{"batch-size": 0}': "--batch-size must be positive, got 0",
    '{"lr": 1, "lr": 2}': "is neither JSON nor JSON5: lr is given twice",
    '{"batch-size": 1, "batch_size": 2}': "batch_size is given twice",
    "[]": "must hold a JSON object, got a list",
    "[" * 100_000: "is neither JSON nor JSON5",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:24])
def test_what_a_file_cannot_say_is_refused_in_one_line(tmp_path, capsys, text):
    path = write(tmp_path / "config.json", text)
    assert REFUSED[text] in fails(capsys, "train", *TYPED, "--config", path)


def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    for path, reason in (("gone.json", "No such file"), ("", "Is a directory"), ("binary.json", "utf-8")):
        path = str(tmp_path / path)
        assert f"{path} cannot be read: " in fails(capsys, "train", *TYPED, "--config", path)
        assert reason in fails(capsys, "regenerate", *TYPED, "--config", path)
    assert "--config" in fails(capsys, "train", *TYPED, "--config")


def test_every_command_refuses_what_belongs_to_another(tmp_path, capsys):
    path = write(tmp_path / "config.json", {"num-beams": 5})
    for words in (["train", *TYPED], ["regenerate", *TYPED], ["evaluate"]):
        assert "num-beams is not an option of this command" in fails(capsys, *words, "--config", path)
