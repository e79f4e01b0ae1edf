"""What checkpoints on disk say of themselves: configs and the headers of safetensors files. No weights are loaded."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from redrafter.drafting.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import APPLE, DRAFTER_FOLDER, kind_of, read_json

__all__ = [
    "APPLE",
    "INDEX",
    "WEIGHTS",
    "Header",
    "check_tensors",
    "drafter_shapes",
    "kind_of",
    "read_base",
    "read_drafter",
    "read_file",
    "read_headers",
    "read_json",
]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Header:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_base(directory: Path) -> tuple[PretrainedConfig, dict[str, Header]]:
    """A Hugging Face model's config and its tensors. Raises `CheckpointError` when a file is missing or cut short."""
    kind = kind_of(directory)
    if kind not in ("model", "merged checkpoint"):
        raise CheckpointError(f"{directory} is a {kind}, not a model")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from error
    return config, read_headers(directory)


def read_drafter(directory: Path) -> tuple[DrafterConfig, dict[str, Header]]:
    """A drafter's config and its tensors, which must be exactly those that such a drafter has."""
    kind = kind_of(directory)
    if kind != "drafter":
        hint = f"; its drafter is {directory / DRAFTER_FOLDER}" if kind == "merged checkpoint" else ""
        raise CheckpointError(f"{directory} is a {kind}, not a drafter{hint}")
    try:
        config = DrafterConfig.from_pretrained(directory)
    except Exception as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from error
    found = read_headers(directory)
    check_tensors(drafter_shapes(config, directory), {name: each.shape for name, each in found.items()}, directory)
    return config, found


def drafter_shapes(config: DrafterConfig, place: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a drafter's tensors. Raises `CheckpointError` naming the place, for a config of none."""
    try:
        config.check()
    except ArgumentError as error:
        raise CheckpointError(f"{place / 'config.json'}: {error}") from error
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in RecurrentDrafter(config).state_dict().items()}


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], place: Path) -> None:
    """Raise `CheckpointError` unless the tensors are those that a config asks for. `emb_norm.weight` may be there too:
    some of Apple's drafters have it, and nothing reads it."""
    extra = [name for name in found if name not in expected and name != "emb_norm.weight"]
    for name, shape in expected.items():
        if name not in found:
            near = difflib.get_close_matches(name, extra or list(found), n=1, cutoff=0.0)
            hint = f"; the nearest that is there is {near[0]}" if near else ""
            raise CheckpointError(f"{place} has no tensor {name}, which its config asks for{hint}")
        if found[name] != shape:
            raise CheckpointError(f"{place} has {name} of shape {found[name]} instead of {shape}")
    if extra:
        raise CheckpointError(f"{place} has a tensor {extra[0]}, which its config does not ask for")


def read_headers(directory: Path) -> dict[str, Header]:
    """The tensors of a directory with one file of weights, or several and an index."""
    wanted: set[str] = set()
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{directory / INDEX} names {name!r}, which is no file of that directory")
        wanted, files = set(weight_map), sorted(set(weight_map.values()))
    elif (directory / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        raise CheckpointError(f"{directory} has no {WEIGHTS}; save the model with save_pretrained")
    headers: dict[str, Header] = {}
    for file in files:
        headers |= read_file(directory / file)
    if wanted - headers.keys():
        raise CheckpointError(
            f"{directory / INDEX} names tensors that no file has: {sorted(wanted - headers.keys())[0]}"
        )
    return headers


def read_file(file: Path) -> dict[str, Header]:
    """The tensors of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  not a dict
            return {name: Header(file, tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing, cut short or no safetensors file: {first_line(error)}") from error
