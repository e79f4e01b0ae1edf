"""Write drafters as Apple publishes them, run `redrafter convert`, and read what it wrote."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.command_line import fails
from helpers.models import HIDDEN, VOCAB
from redrafter.cli import main

APPLE_NAMINGS = {"A": ("input_proj", "lm_head"), "B": ("input_projs", "lm_heads"), "C": ("input_proj", "0")}
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


def apple_tensors(
    exit_dim: int = 2 * HIDDEN, layers: int = 2, rnn: bool = True, naming: str = "A"
) -> dict[str, Tensor]:
    """Return random tensors of an Apple drafter by their published names, of generation A, B or C."""
    random = torch.Generator().manual_seed(exit_dim + layers)
    proj, heads = APPLE_NAMINGS[naming]
    shapes: dict[str, tuple[int, ...]] = {}
    if exit_dim != 2 * HIDDEN:
        shapes |= {f"{proj}.weight": (exit_dim, 2 * HIDDEN), f"{proj}.bias": (exit_dim,)}
    for i in range(layers):
        shapes |= {f"{heads}.{i}.linear.weight": (exit_dim, exit_dim), f"{heads}.{i}.linear.bias": (exit_dim,)}
    shapes[f"{heads}.{layers}.weight"] = VOCAB, exit_dim
    if rnn:
        shapes |= {"rnn_u.weight": (HIDDEN, HIDDEN), "rnn_u.bias": (HIDDEN,), "rnn_w.weight": (HIDDEN, HIDDEN)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {name: x / 8 if name.endswith("linear.weight") else x for name, x in tensors.items()}


def apple_dir(place: Path, tensors: dict[str, Tensor] | None = None, naming: str = "A", **form: object) -> Path:
    """Write an Apple drafter of a form, or with these tensors, and return its directory."""
    place.mkdir()
    published = {
        "architectures": ["Drafter"],
        "emb_norm": False,
        "exit_dim": form.get("exit_dim", 2 * HIDDEN),
        "hidden_size": HIDDEN,
        "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": form.get("layers", 2),
        "num_lookback_tokens": -1,
        "rms_norm_eps": 1e-05,
        "rnn": form.get("rnn", True),
        "torch_dtype": "float32",
        "transformers_version": "4.44.0",
        "vocab_size": VOCAB,
    }
    (place / "config.json").write_text(json.dumps(published))
    save_file(apple_tensors(**form, naming=naming) if tensors is None else tensors, place / "model.safetensors")
    return place


def updated(tensors: dict[str, Tensor], change: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors with some replaced or added, and without those that are None in `change`."""
    return {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}


def changed(place: Path, **changes: object) -> None:
    """Edit the config.json of a directory; a value of `...` removes the key."""
    values = config(place) | changes
    (place / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
