"""Run `redrafter convert`, and read what it wrote."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.command_line import fails
from redrafter.cli import main

SHORT = {"base": "base_model_checkpoint_dir", "drafter": "drafter_model_dir", "output": "output_dir"}


def words(**options: object) -> list[str]:
    """Return the flags for options, whose names are the flags' or in `SHORT`; True is for a flag without a value."""
    pairs = [(f"--{SHORT.get(name, name).replace('_', '-')}", value) for name, value in options.items()]
    return [str(word) for pair in pairs for word in pair if word is not True]


def convert(output: Path | None, **options: object) -> Any:
    """Convert, and return the output directory, which may be None for a dry run."""
    where = {} if output is None else {"output": output}
    assert main(["convert", *words(**options, **where)]) == 0
    return output


def refused(capsys: Any, **options: object) -> str:
    """Run a conversion that must fail, and return its one line on stderr."""
    capsys.readouterr()
    return fails(capsys, "convert", *words(**options))


def config(place: Path) -> dict[str, Any]:
    """Return the config.json of a directory."""
    return json.loads((place / "config.json").read_text())


def weights(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a directory."""
    return load_file(place / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two state dicts are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
