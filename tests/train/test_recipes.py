"""Recipes of `redrafter train`: what they fill in, which one is printed, and where they are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training import command, refused
from redrafter.train.checkpoints import TrainingIdentity
from redrafter.train.config import RECIPES, TrainConfig, parse

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
TYPED = ["--model", "m", "--data", "x.jsonl", "--output", "o"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_what_neither_a_flag_nor_a_file_sets(tmp_path, name):
    assert parse([*TYPED, "--recipe", name]) == TrainConfig(
        model="m", data=("x.jsonl",), output="o", recipe=name, **RECIPES[name].options
    )
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"recipe": name, "batch-size": 3}))
    default = TrainConfig.dtype
    config = parse([*TYPED, "--config", str(file), "--lr", "0.5", "--dtype", default])
    assert (config.recipe, config.batch_size, config.lr, config.dtype) == (name, 3, 0.5, default)


def test_the_small_recipe_is_that_of_the_drafter_that_ships():
    made = json.loads((EXAMPLE / "drafter" / "training.json").read_text())["config"]
    options = RECIPES["small"].options
    assert {name: made[name] for name in options} == options
    assert "--recipe small" in (EXAMPLE / "README.md").read_text()


def test_a_training_may_be_resumed_with_the_options_of_its_recipe_alone():
    config = parse([*TYPED, "--recipe", "small"])
    followed, typed = (
        TrainingIdentity.from_config(each, "base", "data", 1) for each in (config, replace(config, recipe=None))
    )
    assert followed == typed


@pytest.mark.parametrize("option", ["--form eagle3", "--recurrence apple", "--drafter d"])
def test_a_recipe_with_a_form_is_refused_where_another_is_asked_for(tmp_path, capsys, option):
    asked = option.removesuffix(" d")
    error = refused(capsys, command(tmp_path, *option.split(), "--recipe", "small"))
    assert f"--recipe small is for a new drafter with a gated cell: leave it out with {asked}" in error
    assert parse([*TYPED, *option.split(), "--recipe", "large"]).recipe == "large"
