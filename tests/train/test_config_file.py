"""Options from JSON files: what they may say, what wins over them, and the recipes that ship as such files."""

import json
from pathlib import Path

import pytest

from helpers.command_line import fails
from helpers.training import command, record
from redrafter import RecurrentDrafter
from redrafter.app.config_file import ConfigParser
from redrafter.app.flags import add_options
from redrafter.cli import main
from redrafter.cli.measure_options import EvaluateOptions, Search
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


def test_recipes_are_there_for_every_class_of_base():
    names = {recipe.stem for recipe in RECIPES}
    assert names == {"tiny", "llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "qwen3-30b-a3b"}
    readme = (RECIPES[0].parents[1] / "README.md").read_text()
    assert all(f"recipes/{name}.json" in readme for name in names)


def test_the_tiny_recipe_trains(tmp_path, capsys):
    tiny = next(str(recipe) for recipe in RECIPES if recipe.stem == "tiny")
    words = command(tmp_path)
    words = [*words[: words.index("--length")], "--steps", "2", "--config", tiny]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    config = RecurrentDrafter.from_pretrained(tmp_path / "out").config
    assert (config.recurrence, config.head_rank, config.trained_draft_len) == ("gated", 32, 3)
    assert record(tmp_path)["steps"] == 2


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


def test_searches_are_listed_or_typed(tmp_path):
    for shapes in (["5x5", "1x4"], "5x5,1x4"):
        path = write(tmp_path / "evaluate.json", {"shapes": shapes, "node-budgets": [26]})
        parser = ConfigParser(options=[EvaluateOptions])
        add_options(parser, EvaluateOptions, "measuring")
        assert vars(parser.parse_args(["--config", path])) == {
            "shapes": (Search(5, 5), Search(1, 4)),
            "node_budgets": (26,),
        }


REFUSED = {
    '{"batch-sise": 8}': "batch-sise is not an option of this command; did you mean batch_size?",
    '{"no-pack": true}': 'no-pack is not an option of this command; write "pack": false',
    '{"weather": 8}': "weather is not an option of this command",
    '{"batch-size": "8"}': 'batch-size must be a whole number, got "8"',
    '{"batch-size": 0}': "--batch-size must be positive, got 0",
    '{"lr": NaN}': "--lr must be positive, got nan",
    '{"data": []}': "data must be a list of strings, got []",
    '{"target-layers": "1,x"}': "target-layers must be a list of whole numbers",
    '{"dtype": "float99"}': 'dtype must be one of auto, float32, bfloat16, float16, got "float99"',
    '{"lr": 1, "lr": 2}': "is not JSON: lr is given twice",
    '{"batch-size": 1, "batch_size": 2}': "batch_size is given twice",
    "": "is empty; it must hold a JSON object",
    "[]": "must hold a JSON object, got a list",
    '"lr"': "must hold a JSON object, got a string",
    "null": "must hold a JSON object, got a null",
    "{lr: 1}": "is not JSON",
    "[" * 100_000: "is not JSON",
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
