"""Read configs and safetensors headers of checkpoints, without loading weights."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from redrafter.drafting.drafter_types import DRAFTER_CLASSES, DrafterArchitecture
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, kind_of, read_json

__all__ = [
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "TensorHeader",
    "check_tensors",
    "drafter_shapes",
    "read_base",
    "read_drafter",
    "read_file_headers",
    "read_headers",
]

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor in a safetensors file.

    Attributes:
        file: Path of the file.
        shape: Shape of the tensor.
        dtype: Dtype in the words of safetensors, such as `BF16`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_base(directory: Path) -> tuple[PretrainedConfig, dict[str, TensorHeader]]:
    """Read the config and the tensor headers of a Hugging Face model.

    Args:
        directory: A model or a merged checkpoint.

    Returns:
        The config, and the headers by the names of the tensors.

    Raises:
        CheckpointError: If the directory holds something else, or a file is missing or cut short.
    """
    kind = kind_of(directory)
    if kind not in ("model", "merged checkpoint"):
        raise CheckpointError(f"{directory} is a {kind}, not a model")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from error
    return config, read_headers(directory)


def read_drafter(directory: Path) -> tuple[DrafterArchitecture, dict[str, TensorHeader]]:
    """Read the config and the tensor headers of a drafter.

    Args:
        directory: A drafter of this project.

    Returns:
        The config, and the headers by the names of the tensors.

    Raises:
        CheckpointError: If the directory holds something else, a file cannot be read, or the tensors are not those
            that the config asks for.
    """
    kind = kind_of(directory)
    if kind != "drafter":
        hint = f"; its drafter is {directory / DRAFTER_FOLDER}" if kind == "merged checkpoint" else ""
        raise CheckpointError(f"{directory} is a {kind}, not a drafter{hint}")
    try:
        model_type = read_json(directory / "config.json")["model_type"]
        config: Any = DRAFTER_CLASSES[model_type].config_class.from_pretrained(directory)
    except Exception as error:
        raise CheckpointError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from error
    headers = read_headers(directory)
    shapes = {name: header.shape for name, header in headers.items()}
    check_tensors(drafter_shapes(config, directory), shapes, directory)
    return config, headers


def drafter_shapes(config: DrafterArchitecture, directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by their names.

    Args:
        config: Config of the drafter.
        directory: Where the config was read, for errors.

    Raises:
        CheckpointError: If the config's values are out of range.
    """
    try:
        config.check()
    except ArgumentError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    with torch.device("meta"):
        drafter: Any = DRAFTER_CLASSES[config.model_type]
        return {name: tuple(tensor.shape) for name, tensor in drafter(config).state_dict().items()}


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    """Check that a checkpoint has the tensors that its config asks for, and no others.

    `emb_norm.weight` may be there too: some of Apple's drafters have it, and nothing reads it.

    Args:
        expected: Shapes that the config asks for, by name.
        actual: Shapes of the tensors in the checkpoint, by name.
        directory: The checkpoint, for errors.

    Raises:
        CheckpointError: If a tensor is missing, has another shape, or is not asked for.
    """
    extra = [name for name in actual if name not in expected and name != "emb_norm.weight"]
    for name, shape in expected.items():
        if name not in actual:
            near = difflib.get_close_matches(name, extra or list(actual), n=1, cutoff=0.0)
            hint = f"; the nearest that is there is {near[0]}" if near else ""
            raise CheckpointError(f"{directory} has no tensor {name}, which its config asks for{hint}")
        if actual[name] != shape:
            raise CheckpointError(f"{directory} has {name} of shape {actual[name]} instead of {shape}")
    if extra:
        raise CheckpointError(f"{directory} has a tensor {extra[0]}, which its config does not ask for")


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Read the tensor headers of a directory, which has one file of weights, or several and an index.

    Args:
        directory: A directory that `save_pretrained` wrote.

    Returns:
        The headers by the names of the tensors.

    Raises:
        CheckpointError: If a file is missing or cut short, or lacks tensors that the index names.
    """
    indexed: set[str] = set()
    if (directory / INDEX_FILE).is_file():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{directory / INDEX_FILE} names {name!r}, which is no file of that directory")
        indexed, files = set(weight_map), sorted(set(weight_map.values()))
    elif (directory / WEIGHTS_FILE).is_file():
        files = [WEIGHTS_FILE]
    else:
        raise CheckpointError(f"{directory} has no {WEIGHTS_FILE}; save the model with save_pretrained")
    headers: dict[str, TensorHeader] = {}
    for file in files:
        headers |= read_file_headers(directory / file)
    if missing := indexed - headers.keys():
        raise CheckpointError(f"{directory / INDEX_FILE} names tensors that no file has: {min(missing)}")
    return headers


def read_file_headers(file: Path) -> dict[str, TensorHeader]:
    """Read the tensor headers of one safetensors file.

    Returns:
        The headers by the names of the tensors.

    Raises:
        CheckpointError: If the file is missing, cut short or of another format.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  not a dict
            return {name: TensorHeader(file, tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing, cut short or no safetensors file: {first_line(error)}") from error
