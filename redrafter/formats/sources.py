"""Sources of a conversion: a base model and a drafter in any of the formats, as configs and tensors not yet loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from redrafter.checkpoints.drafters import check_fits_base, embedding_norms
from redrafter.checkpoints.gguf_weights import dequantize
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.models import load_config
from redrafter.drafting.drafter_config import AnyDrafterConfig, DrafterConfig
from redrafter.drafting.drafter_model import DrafterModel, check_draft_ids
from redrafter.drafting.drafter_types import drafter_class, make_drafter, open_drafter_model
from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import (
    DRAFTER_FOLDER,
    SHAPE_FILE,
    check_source,
    config_errors,
    download,
    kind_of,
    read_json,
    scheme_name,
)
from redrafter.files.dtype_names import dtype_name
from redrafter.files.gguf_file import GgufModel, find_gguf, find_parts, read_gguf, shape_of
from redrafter.files.headers import read_headers, weight_files
from redrafter.files.hub import find_model_file
from redrafter.files.stored_tensors import read_pickle
from redrafter.formats import apple, dflash, eagle, trtllm
from redrafter.formats.float8 import read_quantized
from redrafter.formats.tensors import StoredTensor, check_tensors, empty, memory_tensor, stored_tensors
from redrafter.formats.unread import refuse_unread
from redrafter.model.linear_layers import quantization_of
from redrafter.model.supported import config_width
from redrafter.model.weights import hold_in_memory
from redrafter.tree.sizes import TreeShape

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Modules that read drafters of others, by the kind of directory. Engines read those of `FOREIGN` themselves.
FOREIGN: dict[str, ModuleType] = {"EAGLE-3 head": eagle, "speculators checkpoint": eagle, "DFlash drafter": dflash}
FORMATS = {"Apple drafter": apple, **FOREIGN}
PICKLE_FILES = ("model.pt", "pytorch_model.bin")
# Folders of a model directory that belong to the model: `save_pretrained` keeps further chat templates in this one.
MODEL_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class SourceBase:
    """A base model that was opened: its config and the headers of its weights.

    Attributes:
        directory: Where it is.
        config: Hugging Face's config; read back from TensorRT-LLM's for such a checkpoint.
        tensors: Tensors by Hugging Face's names; empty for a quantised TensorRT-LLM checkpoint.
        trtllm_config: `config.json` of a TensorRT-LLM checkpoint; None for a Hugging Face model.
        ranks: Tensors of each rank of a TensorRT-LLM checkpoint, without its drafter's.
        gguf: The model of a GGUF file, whose tensors have llama.cpp's names and layout, and are read as float32; None
            for any other model.
    """

    directory: Path
    config: PretrainedConfig
    tensors: dict[str, StoredTensor]
    trtllm_config: dict[str, Any] | None = None
    ranks: Sequence[dict[str, StoredTensor]] = ()
    gguf: GgufModel | None = None

    def files(self) -> dict[str, Path]:
        """Return the files of a Hugging Face model's directory that belong to the model, by their relative names."""
        if (file := find_gguf(self.directory)) is not None:
            return {part.name: part for part in find_parts(file)}  # the first has the config and the tokenizer too
        files = {}
        for entry in sorted(self.directory.iterdir()):
            # The conversion writes a new shape file, with the new drafter's defaults.
            if entry.is_file() and entry.name != SHAPE_FILE and not entry.name.startswith("."):
                files[entry.name] = entry
            elif entry.is_dir() and entry.name in MODEL_FOLDERS:
                files |= {str(x.relative_to(self.directory)): x for x in sorted(entry.rglob("*")) if x.is_file()}
        return files

    @cached_property  # tables of GGUF files are dequantised whole
    def embedding_norms(self) -> dict[str, list[float]]:
        """Norms of a few rows of each tensor that has the shape of the embedding table.

        A drafter's config holds these norms of its base. Only the model's code knows which tensor is the table; the
        head is the one other tensor of its shape.
        """
        config = self.config.get_text_config(decoder=True)
        shape = (getattr(config, "vocab_size", 0), config_width(config) if hasattr(config, "hidden_size") else 0)
        tables = {name: x for name, x in self.tensors.items() if x.shape == shape and x.dtype in FLOAT_DTYPES}
        return {name: embedding_norms(x.read()) for name, x in tables.items()}

    def check_fits(self, drafter: AnyDrafterConfig) -> None:
        """Raise `MismatchError`, with the values of both, if a drafter was made for another base."""
        config, norms = self.config.get_text_config(decoder=True), list(self.embedding_norms.values())
        check_fits_base(drafter, config_width(config), config.vocab_size, norms, str(self.directory))

    @property
    def quantization_method(self) -> str | None:
        """Name of the quantization method, or None for an unquantised base; a GGUF file is dequantised at loading."""
        if self.trtllm_config is not None:
            settings = self.trtllm_config.get("quantization") or {}
            return settings.get("quant_algo") or settings.get("kv_cache_quant_algo")
        entries = quantization_of(self.config)
        return None if entries is None else scheme_name(entries)


def open_base(directory: Path) -> SourceBase:
    """Read the config of a base model and the headers of its weights.

    Raises:
        CheckpointError: When files are missing, broken or not what the config asks for.
        UnsupportedError: When it is a TensorRT-LLM checkpoint of a model other than Llama and Qwen2.
    """
    kind = kind_of(directory)
    if kind.startswith("TensorRT-LLM"):
        config = trtllm.read_config(directory)
        ranks = [
            {name: tensor for name, tensor in rank.items() if not name.startswith(trtllm.DRAFTER_PREFIX)}
            for rank in trtllm.open_ranks(directory, config)
        ]
        base = SourceBase(directory, trtllm.to_hf_config(config, ranks[0], directory), {}, config, ranks)
        # Quantized tensors are only passed on, since their layout depends on the method.
        if base.quantization_method:
            return base
        tensors = trtllm.join_base(ranks, config, directory)
        trtllm.check_base_tensors(base.config, tensors, directory)
        return replace(base, tensors=tensors)
    if kind not in ("model", "merged checkpoint"):
        raise CheckpointError(f"{directory} is a {kind}, not a model")
    if (file := find_gguf(directory)) is not None:
        hf_config, model = load_config(file), read_gguf(file)
        tensors = {
            x.name: StoredTensor(x.name, empty(shape_of(x), torch.float32), partial(dequantize, x))
            for x in model.tensors
        }
        return SourceBase(directory, hf_config, tensors, gguf=model)
    with config_errors(directory, "model"):
        # Conversion needs no code of the model.
        hf_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return SourceBase(directory, hf_config, stored_tensors(read_headers(directory)))


@dataclass(frozen=True)
class SourceDrafter:
    """A drafter that was opened: its config and the headers of its weights.

    Attributes:
        directory: Where it is.
        kind: Kind of the checkpoint in the directory, as `kind_of` names it.
        config: Its config in this project's form.
        tensors: Tensors by this project's names; each `name` is the source's.
        defaults: Search and sampling defaults that a merged or a TensorRT-LLM checkpoint holds.
    """

    directory: Path
    kind: str
    config: AnyDrafterConfig
    tensors: dict[str, StoredTensor]
    defaults: Defaults = field(default_factory=Defaults)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""
        return next(tensor.dtype for tensor in self.tensors.values() if tensor.dtype in FLOAT_DTYPES)

    def fill(self, asked: Defaults) -> Defaults:
        """Return the defaults to write: the requested ones, or else the source's, or else the drafter's config's."""
        config_shape = TreeShape(self.config.draft_beams, self.config.draft_len_per_beam)
        greedy_search = self.defaults.greedy_search if asked.greedy_search is None else asked.greedy_search
        return Defaults(asked.shape.over(self.defaults.shape).over(config_shape), greedy_search)

    def load(self) -> DrafterModel:
        """Load the drafter on the CPU, in the dtype of its weights, without need of its files later."""
        with torch.device("meta"):
            drafter = make_drafter(self.config)
        # `assign`, since parameters on the meta device have no memory to copy into.
        drafter.load_state_dict({name: x.read() for name, x in self.tensors.items()}, assign=True)
        hold_in_memory(drafter)
        return drafter


def is_pair(kind: str) -> bool:
    """Return whether a kind of directory holds a base and a drafter."""
    return kind in ("merged checkpoint", "TensorRT-LLM ReDrafter checkpoint")


def open_drafter(directory: Path, recurrence: str | None = None) -> SourceDrafter:
    """Read the config of a drafter and the headers of its weights.

    Args:
        directory: Where it is.
        recurrence: That of a TensorRT-LLM checkpoint's drafter, which the checkpoint does not hold.

    Raises:
        CheckpointError: When a tensor or file is missing, is not expected or has another shape; it is named.
        ArgumentError: When a recurrence is given for a checkpoint of another kind.
        UnsupportedError: When it is of a form that cannot be computed here.
    """
    kind = kind_of(directory)
    if recurrence is not None and not kind.startswith("TensorRT-LLM"):
        raise ArgumentError(f"--recurrence is for TensorRT-LLM's checkpoints; {directory} is a {kind}")
    if kind == "merged checkpoint":
        drafter = open_drafter(directory / DRAFTER_FOLDER)
        return replace(drafter, kind=kind, defaults=Defaults.from_file(directory / SHAPE_FILE))
    source_name: Callable[[str], str] = str
    defaults = Defaults()
    config: AnyDrafterConfig
    if kind == "drafter":
        own = read_own(directory)
        config, tensors = own.config, own.tensors
    elif (theirs := FORMATS.get(kind)) is not None:
        content, stored = read_json(directory / "config.json"), _open_tensors(directory)
        refuse_unread(content, stored, directory)
        content, stored = read_quantized(content, stored, directory)
        config = theirs.to_redrafter_config(content, stored, directory)
        tensors = theirs.rename_tensors(stored, config, directory)
        if isinstance(config, DrafterConfig):
            source_name = partial(apple.to_apple_name, layers=config.num_draft_layers)
    elif kind == "TensorRT-LLM ReDrafter checkpoint":
        source_name = trtllm.DRAFTER_PREFIX.__add__
        trtllm_config = trtllm.read_config(directory)
        config = trtllm.to_drafter_config(trtllm_config, recurrence, directory)
        defaults = trtllm.to_defaults(trtllm_config)
        ranks = trtllm.open_ranks(directory, trtllm_config)
        names = (name.removeprefix(source_name("")) for name in ranks[0] if name.startswith(source_name("")))
        tensors = trtllm.join(ranks, trtllm.drafter_rules(names), config.vocab_size)
    else:
        raise CheckpointError(f"{directory} is a {kind}, not a drafter, and holds none")
    drafter = SourceDrafter(directory, kind, config, tensors, defaults)
    _check_tensors(drafter, source_name)
    return drafter


def read_own(directory: Path) -> SourceDrafter:
    """Read the config of a drafter of a registered type and the headers of its weights, which are not checked."""
    with config_errors(directory, "drafter"):
        config = drafter_class(directory).config_class.from_pretrained(directory)
    stored = stored_tensors(read_headers(directory))
    _, tensors = read_quantized(read_json(directory / "config.json"), stored, directory)
    return SourceDrafter(directory, "drafter", config, tensors)


def load_drafter_model(name: str | Path) -> DrafterModel:
    """Load a drafter from a directory or a hub id: a registered one, or another project's, converted in memory.

    Of other projects, EAGLE-3 heads and DFlash and DSpark drafters are converted. Raises as `open_drafter` and
    `open_drafter_model` do.
    """
    directory = Path(name)
    if not directory.exists():
        check_source(str(name))
    config = find_model_file(str(name), "config.json")
    if config is None or kind_of(Path(config).parent) not in FOREIGN:
        return open_drafter_model(name)
    if not directory.is_dir():
        directory = download("drafter", name, ("*.json", "*.safetensors", *PICKLE_FILES))
    return open_drafter(directory).load()


def _check_tensors(drafter: SourceDrafter, source_name: Callable[[str], str]) -> None:
    """Refuse a drafter without the tensors that its config asks for, in numbers that it can be computed in.

    Errors name tensors as the source does; `source_name` is its name of one that it lacks.
    """
    config, directory = drafter.config, drafter.directory
    tensors = {name: x for name, x in drafter.tensors.items() if name != apple.UNUSED_NORM}

    def make() -> torch.nn.Module:
        config.check()
        return make_drafter(config)

    names = lambda name: tensors[name].name if name in tensors else source_name(name)  # noqa: E731
    check_tensors(make, {x.name: x for x in tensors.values()}, directory, source_name=names)
    for name, tensor in tensors.items():
        if tensor.dtype not in ((torch.int64,) if name == "draft_ids" else FLOAT_DTYPES):
            short = dtype_name(tensor.dtype)
            raise CheckpointError(f"{directory} has {tensor.name} as {short}, which a drafter cannot be computed in")
    draft_ids = drafter.tensors.get("draft_ids")
    ids = None if draft_ids is None else draft_ids.read()
    check_draft_ids(ids, config.draft_vocab_size, config.vocab_size, directory)


def _open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory's safetensors files, or of its pickle if there are none."""
    file = next((directory / name for name in PICKLE_FILES if (directory / name).is_file()), None)
    if file is None or weight_files(directory)[0]:
        return stored_tensors(read_headers(directory))
    return {name: memory_tensor(name, tensor) for name, tensor in read_pickle(file, mapped=True).items()}
