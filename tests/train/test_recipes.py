"""Recipes of `redrafter train`: what they fill in, which one is printed, and where they are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.training import VOCAB, command, record, refused
from redrafter import DrafterConfig
from redrafter.drafting.drafter_types import make_drafter
from redrafter.train.checkpoints import TrainingIdentity
from redrafter.train.config import TrainConfig, parse
from redrafter.train.plan import describe_recipe
from redrafter.train.recipes import RECIPES, SMALL_BASE
from redrafter.train.train_drafter import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
TYPED = ["--model", "m", "--data", "x.jsonl", "--output", "o"]


def without_validation(tmp_path: Path, *more: str) -> list[str]:
    return command(tmp_path, "--validate-prompts", "0", *more)


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


def test_a_training_prints_the_recipe_that_it_follows(tmp_path, capsys):
    words = without_validation(tmp_path, "--steps", "1", "--overwrite")

    def said(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith(("recipe", "measured"))]

    form, recipe = "residual layers of width 64, a head of", ["--recipe", "small", "--save-dtype", "float32"]
    all_ids = f"over {VOCAB} ids"  # a recipe's 16,384 are more than this base has
    plain = [f"recipe none: 3 {form} full rank {all_ids}; --recipe small is for {RECIPES['small'].suits}"]
    assert said() == said("--dry-run") == plain
    assert said("--recurrence", "apple") == [f"recipe none: 2 {form} full rank {all_ids}"]
    small = [f"recipe small, for {RECIPES['small'].suits}: 2 {form} rank 320 {all_ids}"]
    small += [f"measured with its values: {RECIPES['small'].measured}"]
    assert said(*recipe) == said(*recipe, "--dry-run") == small
    assert record(tmp_path)["config"]["recipe"] == "small"
    further = without_validation(tmp_path, "--steps", "1", "--drafter", str(tmp_path / "out"), "--dry-run")
    assert main(further) == 0
    assert "recipe" not in capsys.readouterr().out


@pytest.mark.parametrize(("parameters", "suits"), [(SMALL_BASE - 1, "small"), (SMALL_BASE, "large")])
def test_the_recipe_that_suits_the_size_of_the_base_is_named(parameters, suits):
    class Base:
        def num_parameters(self) -> int:
            return parameters

    with torch.device("meta"):
        drafter = make_drafter(DrafterConfig(vocab_size=8, hidden_size=4, recurrence="gated"))
    assert f"--recipe {suits} is for {RECIPES[suits].suits}" in describe_recipe(TrainConfig(), Base(), drafter)[0]


def test_a_training_may_be_resumed_with_the_options_of_its_recipe_alone():
    config = parse([*TYPED, "--recipe", "small"])
    followed, typed = (
        TrainingIdentity.from_config(each, "base", "data", 1) for each in (config, replace(config, recipe=None))
    )
    assert followed == typed


@pytest.mark.parametrize("option", ["--form eagle3", "--recurrence apple", "--drafter d"])
def test_a_recipe_with_a_form_is_refused_where_another_is_asked_for(tmp_path, capsys, option):
    asked = option.removesuffix(" d")
    error = refused(capsys, [*without_validation(tmp_path, *option.split()), "--recipe", "small"])
    assert f"--recipe small is for a new drafter with a gated cell: leave it out with {asked}" in error
    assert parse([*TYPED, *option.split(), "--recipe", "large"]).recipe == "large"
