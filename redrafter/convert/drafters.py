"""A drafter in any of the formats it may come in, by this project's names."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from zipfile import is_zipfile

import torch

from redrafter.checkpoints.headers import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_tensors,
    drafter_shapes,
    read_drafter,
    read_headers,
)
from redrafter.checkpoints.merged import Defaults
from redrafter.convert import apple, trtllm
from redrafter.convert.base import FLOATS
from redrafter.convert.tensors import CODES, Stored, held, of_file
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, kind_of, read_json
from redrafter.files.dtype_names import dtype_name

__all__ = ["Drafter", "read"]

PICKLE = "model.pt"


@dataclass(frozen=True)
class Drafter:
    """place: the directory that it is in; kind: what that is. tensors: by our names, with the names they have there.
    defaults: what a merged or a TensorRT-LLM checkpoint says of its search."""

    place: Path
    kind: str
    config: DrafterConfig
    tensors: dict[str, Stored]
    defaults: Defaults = field(default_factory=Defaults)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["lm_head.weight"].dtype


def read(place: Path, recurrence: str | None = None) -> Drafter:
    """The drafter in a directory: ours, Apple's, or that of a merged or a TensorRT-LLM checkpoint.

    recurrence: what a TensorRT-LLM checkpoint does not say. Raises `CheckpointError` naming the tensor or file where
    something is missing, is too much or has another shape.
    """
    kind = kind_of(place)
    if recurrence is not None and not kind.startswith("TensorRT-LLM"):
        raise ArgumentError(f"--recurrence is for TensorRT-LLM's checkpoints, which do not say; {place} is a {kind}")
    if kind == "merged checkpoint":
        found = read(place / DRAFTER_FOLDER)
        return replace(found, kind=kind, defaults=Defaults.read(place / SHAPE_FILE))
    if kind == "drafter":
        config, headers = read_drafter(place)
        tensors = {name: of_file(each.file, name, each.shape, each.dtype) for name, each in headers.items()}
        return _checked(Drafter(place, kind, config, tensors))
    if kind == "Apple drafter":
        return _checked(_apple(place, kind))
    if kind == "TensorRT-LLM ReDrafter checkpoint":
        return _checked(_trtllm(place, kind, recurrence))
    raise CheckpointError(f"{place} is a {kind}, not a drafter, and holds none")


def _apple(place: Path, kind: str) -> Drafter:
    found = _files(place)
    config = apple.config_of(read_json(place / "config.json"), found, place)
    layers = config.num_draft_layers
    tensors: dict[str, Stored] = {}
    for name, tensor in found.items():
        if (own := apple.ours(name, layers)) in tensors:
            raise CheckpointError(f"{place} has {tensors[own].name} and {name}, which are the same tensor's names")
        tensors[own] = tensor
    names = {own: tensor.name for own, tensor in tensors.items()}
    expected = {
        names.get(own, apple.theirs(own, layers)): shape for own, shape in drafter_shapes(config, place).items()
    }
    check_tensors(expected, {name: tensor.shape for name, tensor in found.items()}, place)
    return Drafter(place, kind, config, tensors)


def _trtllm(place: Path, kind: str, recurrence: str | None) -> Drafter:
    said = trtllm.read_config(place)
    config = trtllm.drafter_config(said, recurrence, place)
    tensors = trtllm.whole_drafter(trtllm.read_ranks(place, trtllm.tp_of(said)), config.vocab_size)
    expected = {trtllm.PREFIX + name: shape for name, shape in drafter_shapes(config, place).items()}
    shapes = {trtllm.PREFIX + name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(expected, {name: shape for name, shape in shapes.items() if name != "drafter.emb_norm.weight"}, place)
    return Drafter(place, kind, config, tensors, trtllm.defaults_of(said))


def _checked(found: Drafter) -> Drafter:
    """The same, its numbers of formats that a drafter can have."""
    for name, tensor in found.tensors.items():
        wanted = (torch.int64,) if name == "draft_ids" else FLOATS
        if tensor.dtype not in wanted and name != "emb_norm.weight":
            short = dtype_name(tensor.dtype)
            raise CheckpointError(f"{found.place} has {tensor.name} as {short}, which a drafter cannot be computed in")
    if (ids := found.tensors.get("draft_ids")) is not None:
        held_ids = ids.read(0, ids.length)
        if int(held_ids.min()) < 0 or int(held_ids.max()) >= found.config.vocab_size:
            raise CheckpointError(
                f"{found.place} has draft_ids outside of the {found.config.vocab_size} ids of its base"
            )
    return found


def _files(place: Path) -> dict[str, Stored]:
    """The tensors of safetensors files, or of a pickle when there are none."""
    if not (place / INDEX_FILE).is_file() and not (place / WEIGHTS_FILE).is_file() and (place / PICKLE).is_file():
        return {name: held(name, tensor) for name, tensor in _unpickled(place / PICKLE).items()}
    headers = read_headers(place)
    return {name: of_file(each.file, name, each.shape, each.dtype) for name, each in headers.items()}


def _unpickled(file: Path) -> Mapping[str, torch.Tensor]:
    """A flat state dict. Code in it is not run."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors, and code in it would be run, so it is not loaded; save the state dict of "
            "the drafter with safetensors"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(found, Mapping) or not all(isinstance(each, str) and _plain(found[each]) for each in found):
        raise CheckpointError(f"{file} is no flat state dict of tensors by name")
    return found


def _plain(value: object) -> bool:
    """Whether it is a tensor that a safetensors file can hold."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.dtype in CODES
