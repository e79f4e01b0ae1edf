"""A drafter as the source of a conversion: of this project, Apple, EAGLE-3, a merged or a TensorRT-LLM checkpoint."""

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
from redrafter.convert import apple, eagle, trtllm
from redrafter.convert.source_base import FLOAT_DTYPES
from redrafter.convert.tensors import SAFETENSORS_CODES, LazyTensor, file_tensor, memory_tensor
from redrafter.drafting.drafter_types import DrafterArchitecture
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, kind_of, read_json
from redrafter.files.dtype_names import dtype_name

__all__ = ["SourceDrafter", "is_pair", "open_drafter"]

PICKLE_FILES = ("model.pt", eagle.PICKLE_FILE)


@dataclass(frozen=True)
class SourceDrafter:
    """A drafter that was opened: its config and the headers of its weights.

    Attributes:
        directory: Where it is.
        kind: What the directory holds, as `kind_of` names it.
        config: Its config in this project's form.
        tensors: Tensors by this project's names; each `name` is that of the source.
        defaults: Search and sampling defaults that a merged or a TensorRT-LLM checkpoint holds.
    """

    directory: Path
    kind: str
    config: DrafterArchitecture
    tensors: dict[str, LazyTensor]
    defaults: Defaults = field(default_factory=Defaults)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the head."""
        return self.tensors["lm_head.weight"].dtype


def is_pair(kind: str) -> bool:
    """Return whether a kind of directory holds a base and a drafter."""
    return kind in ("merged checkpoint", "TensorRT-LLM ReDrafter checkpoint")


def open_drafter(directory: Path, recurrence: str | None = None) -> SourceDrafter:
    """Read the config of a drafter and the headers of its weights.

    Args:
        directory: A drafter of this project, Apple's drafter, an EAGLE-3 head, a merged checkpoint or a TensorRT-LLM
            checkpoint.
        recurrence: The recurrence of a TensorRT-LLM checkpoint's drafter, which the checkpoint does not hold.

    Raises:
        CheckpointError: When a tensor or file is missing, is not expected or has another shape; it is named.
        ArgumentError: When a recurrence is given for a checkpoint of another kind.
        UnsupportedError: When an EAGLE-3 head is of a form that cannot be computed here.
    """
    kind = kind_of(directory)
    if recurrence is not None and not kind.startswith("TensorRT-LLM"):
        raise ArgumentError(
            f"--recurrence is for TensorRT-LLM's checkpoints, which do not say; {directory} is a {kind}"
        )
    if kind == "merged checkpoint":
        drafter = open_drafter(directory / DRAFTER_FOLDER)
        return replace(drafter, kind=kind, defaults=Defaults.read(directory / SHAPE_FILE))
    if kind == "drafter":
        config, headers = read_drafter(directory)
        tensors = {name: file_tensor(header.file, name, header.shape, header.dtype) for name, header in headers.items()}
        drafter = SourceDrafter(directory, kind, config, tensors)
    elif kind == "Apple drafter":
        drafter = _open_apple(directory, kind)
    elif kind in ("EAGLE-3 head", "speculators checkpoint"):
        drafter = _open_eagle(directory, kind)
    elif kind == "TensorRT-LLM ReDrafter checkpoint":
        drafter = _open_trtllm(directory, kind, recurrence)
    else:
        raise CheckpointError(f"{directory} is a {kind}, not a drafter, and holds none")
    _check_values(drafter)
    return drafter


def _open_apple(directory: Path, kind: str) -> SourceDrafter:
    stored = _open_tensors(directory)
    config = apple.to_redrafter_config(read_json(directory / "config.json"), stored, directory)
    layers = config.num_draft_layers
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        if (new_name := apple.to_redrafter_name(name, layers)) in tensors:
            raise CheckpointError(
                f"{directory} has {tensors[new_name].name} and {name}, which are the same tensor's names"
            )
        tensors[new_name] = tensor
    expected = {
        tensors[name].name if name in tensors else apple.to_apple_name(name, layers): shape
        for name, shape in drafter_shapes(config, directory).items()
    }
    check_tensors(expected, {name: tensor.shape for name, tensor in stored.items()}, directory)
    return SourceDrafter(directory, kind, config, tensors)


def _open_eagle(directory: Path, kind: str) -> SourceDrafter:
    stored = _open_tensors(directory)
    config = eagle.to_redrafter_config(read_json(directory / "config.json"), stored, directory)
    tensors = eagle.split_tensors(stored, config, directory)
    expected = {
        tensors[name].name if name in tensors else name: shape
        for name, shape in drafter_shapes(config, directory).items()
    }
    check_tensors(expected, {tensor.name: tensor.shape for tensor in tensors.values()}, directory)
    return SourceDrafter(directory, kind, config, tensors)


def _open_trtllm(directory: Path, kind: str, recurrence: str | None) -> SourceDrafter:
    trtllm_config = trtllm.read_config(directory)
    config = trtllm.to_drafter_config(trtllm_config, recurrence, directory)
    ranks = trtllm.open_ranks(directory, trtllm.tensor_parallel_size(trtllm_config))
    tensors = trtllm.join_drafter(ranks, config.vocab_size)
    prefix = trtllm.DRAFTER_PREFIX
    expected = {prefix + name: shape for name, shape in drafter_shapes(config, directory).items()}
    shapes = {prefix + name: tensor.shape for name, tensor in tensors.items() if name != apple.UNUSED_NORM}
    check_tensors(expected, shapes, directory)
    return SourceDrafter(directory, kind, config, tensors, trtllm.to_defaults(trtllm_config))


def _check_values(drafter: SourceDrafter) -> None:
    """Raise `CheckpointError` for a number format that no drafter computes in, or draft ids that the base lacks."""
    for name, tensor in drafter.tensors.items():
        usable = (torch.int64,) if name == "draft_ids" else FLOAT_DTYPES
        if tensor.dtype not in usable and name != apple.UNUSED_NORM:
            short = dtype_name(tensor.dtype)
            raise CheckpointError(
                f"{drafter.directory} has {tensor.name} as {short}, which a drafter cannot be computed in"
            )
    if (draft_ids := drafter.tensors.get("draft_ids")) is not None:
        ids = draft_ids.read(0, draft_ids.length)  # [V']
        if int(ids.min()) < 0 or int(ids.max()) >= drafter.config.vocab_size:
            raise CheckpointError(
                f"{drafter.directory} has draft_ids outside of the {drafter.config.vocab_size} ids of its base"
            )


def _open_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a directory's safetensors files, or of its pickle if there are none."""
    has_safetensors = (directory / INDEX_FILE).is_file() or (directory / WEIGHTS_FILE).is_file()
    pickles = [directory / name for name in PICKLE_FILES if (directory / name).is_file()]
    if pickles and not has_safetensors:
        return {name: memory_tensor(name, tensor) for name, tensor in _unpickle(pickles[0]).items()}
    headers = read_headers(directory)
    return {name: file_tensor(header.file, name, header.shape, header.dtype) for name, header in headers.items()}


def _unpickle(file: Path) -> Mapping[str, torch.Tensor]:
    """Load a flat state dict from a pickle, without running code in it."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors, and code in it would be run, so it is not loaded; save the state dict of "
            "the drafter with safetensors"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and _is_storable(tensors[name]) for name in tensors
    ):
        raise CheckpointError(f"{file} is no flat state dict of tensors by name")
    return tensors


def _is_storable(value: object) -> bool:
    """Return whether a value is a tensor that a safetensors file can hold."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.dtype in SAFETENSORS_CODES
