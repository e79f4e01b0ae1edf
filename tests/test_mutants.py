"""What `make mutants` plants, and what it needs to find it."""

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")

from cosmic_ray.config import load_config
from cosmic_ray.mutating import mutate_code

from mutants.operators import OPERATORS
from mutants.sample import computed

ROOT = Path(__file__).parents[1]
CONFIG = load_config(ROOT / "tests/mutants/cosmic-ray.toml")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_plant_what_their_examples_say(name):
    for example in OPERATORS[name].examples():
        planted = mutate_code(example.pre_mutation_code, OPERATORS[name](), example.occurrence)
        assert planted == example.post_mutation_code


def test_annotations_and_formatting_are_nothing_that_a_module_computes():
    assert computed("def f(x: int | None) -> int:\n    return x") == computed("def f(x: int & None):\n  return x")
    assert computed("x = 1") != computed("x = 2")


def test_files_and_their_guards_exist():
    for file, guards in CONFIG["guards"].items():
        for path in (file, *(guard.partition("::")[0] for guard in guards)):
            assert (ROOT / path).exists(), path
    assert set(CONFIG["accepted"]) <= set(CONFIG["guards"])
