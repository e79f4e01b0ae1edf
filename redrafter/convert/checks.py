"""Describe a checkpoint with torch: whether it can be a target, fits its drafter, and converts to other formats."""

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from redrafter.cache.dense import cache_in
from redrafter.cache.states import StateShape
from redrafter.checkpoints.gguf_weights import describe_formats, is_grouped
from redrafter.checkpoints.merged import Defaults, boxed_pair
from redrafter.checkpoints.mtp_layer import find_layer
from redrafter.convert.info import SIZES, Stored, drafter_facts, model_facts
from redrafter.convert.plan import possible_formats
from redrafter.drafting.drafter_types import drafter_class
from redrafter.drafting.mtp import MTPConfig
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, ReDrafterError
from redrafter.files.checkpoint_kind import check_path, kind_of, read_json
from redrafter.files.dtype_names import dtype_name
from redrafter.files.hub import find_snapshot
from redrafter.formats.sources import FORMATS, SourceBase, SourceDrafter, is_pair, open_base, open_drafter, read_own
from redrafter.formats.tensors import StoredTensor
from redrafter.measure.record import versions
from redrafter.model.recurrent_layers import layer_tensors
from redrafter.model.supported import check_states_found, check_supported, config_width, stored_shapes


def describe(name: str, drafter_name: str | None = None) -> dict[str, object]:
    """Return facts about a checkpoint, or about a model and a drafter for it.

    Args:
        name: Directory, or hub id that was downloaded before.
        drafter_name: The same of a drafter for the model.

    Returns:
        The JSON document that `redrafter info --json` prints.

    Raises:
        CheckpointError: When files are missing or broken.
        ArgumentError: `drafter_name` is given and the checkpoint is a drafter itself.
    """
    directory = _locate(name)
    kind = kind_of(directory)
    document: dict[str, object] = {"path": str(directory), "kind": kind}
    if kind == "drafter" and not drafter_class(directory).made_from_config:
        return document | {"drafter": _describe_drafter(read_own(directory))}
    if kind in ("drafter", *FORMATS):
        if drafter_name is not None:
            raise ArgumentError(f"{name} is a drafter itself: give the model first, and the drafter with --drafter")
        drafter = open_drafter(directory)
        return document | {"drafter": _describe_drafter(drafter), "converts_to": possible_formats(drafter)}
    base = open_base(directory)
    ranks = {f"{number} {name}": x for number, rank in enumerate(base.ranks) for name, x in rank.items()}
    stored = _stored(base.tensors or ranks)
    document["model"] = _describe_model(base, stored)
    if drafter_name is None and not is_pair(kind):
        if (found := find_layer(base.tensors)) is not None:
            text = base.config.get_text_config(decoder=True)
            config = MTPConfig(vocab_size=text.vocab_size, hidden_size=config_width(text), **found.config)
            tensors = {name: base.tensors[name] for name in found.names if name in base.tensors}
            document["drafter"] = _describe_drafter(SourceDrafter(directory, kind, config, tensors))
        return document
    drafter = open_drafter(directory if drafter_name is None else _locate(drafter_name))
    document["drafter"] = {"path": str(drafter.directory)} | _describe_drafter(drafter)
    if is_pair(drafter.kind):
        defaults = drafter.fill(Defaults())
        document["shape"] = defaults.shape.to_dict() | {"greedy_search": defaults.greedy_search}
    try:
        base.check_fits(drafter.config)
    except MismatchError as error:
        return document | {"fits": False, "why_not": str(error)}
    return document | {"fits": True, "converts_to": possible_formats(drafter, base)}


def _locate(name: str) -> Path:
    """Resolve a directory, a GGUF file, or a hub id in the local download cache; never downloads gigabytes."""
    check_path(name)
    found = Path(name) if Path(name).exists() else find_snapshot(name)
    if found is None:
        raise CheckpointError(
            f"{name} is not a directory, and was not downloaded, which info never does: type `hf download {name}` first"
        )
    return found


def _describe_model(base: SourceBase, stored: Stored) -> dict[str, object]:
    config: Any = base.config.get_text_config(decoder=True)
    names = getattr(config, "architectures", None) or base.config.architectures
    architecture = ", ".join(names) if isinstance(names, list) else config.model_type
    facts: dict[str, object] = model_facts(
        architecture, [getattr(config, size, None) for size in SIZES], stored, base.quantization_method
    )
    if base.ranks:
        return facts | {"ranks": len(base.ranks)}
    if base.gguf is not None:
        facts["stored_as"] = base.gguf.stored_as
        grouped = "float32 on a CPU, else " if any(map(is_grouped, base.gguf.tensors)) else ""
        facts["computed_as"] = describe_formats(base.gguf)
        facts["loaded_as"] = f"{grouped}{dtype_name(base.gguf.dtype)}, unless --dtype names another format"
    return facts | {"target": _describe_target(base.config)}


def _describe_target(config: Any) -> str:
    """Describe whether a model can be a target: run a model built from its config, on the meta device."""
    loaders = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    loader: Any = next((loader for loader, types in loaders.items() if config.model_type in types), None)
    if loader is None and not hasattr(config, "auto_map"):
        kind = "; it is an encoder-decoder" if config.is_encoder_decoder else ""
        return f"no: transformers has no causal LM of the type {config.model_type}{kind}"
    try:
        # A forward on the meta device shows the shapes of the cache without weights.
        with torch.device("meta"), torch.no_grad():
            model: Any = loader.from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
            name, text = type(model).__name__, model.config.get_text_config(decoder=True)
            check_supported(model, name)
            output = model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=True)
        cache = cache_in(output)
        # Check only that recurrent states exist: whether they can be rolled back is tested when weights are loaded.
        states = [
            StateShape(layer, state, tuple(x.shape[1:]), x.dtype, x.device)
            for layer, kept in enumerate(getattr(cache, "layers", ()))
            for state, x in layer_tensors(kept).items()
        ]
        if not states:
            check_states_found(model, text, name)
        stored_shapes(output, text, name, states)
    except ReDrafterError as error:
        return f"no: {error}"
    except Exception:  # modelling code that reads values, or remote code; both fail on the meta device
        return "not known before it is loaded, and tested"
    return "yes, by its config; it is tested when it is loaded"


def _describe_drafter(drafter: SourceDrafter) -> dict[str, object]:
    config = drafter.config
    # Show the drafter's own fields only, not those that every transformers config has.
    theirs = {item.name for item in fields(PretrainedConfig)}
    own = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in theirs}
    own["quantization_config"] = read_json(drafter.directory / "config.json").get("quantization_config")
    return drafter_facts(config.kind, _stored(drafter.tensors), own)


def _stored(tensors: Mapping[str, StoredTensor]) -> Stored:
    return {name: (tensor.shape, dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


def environment() -> dict[str, object]:
    """Describe the boxed pair and the versions of the libraries, for `redrafter info` without a model."""
    boxed, gpus = boxed_pair(), range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    document = describe(str(boxed)) if boxed.is_dir() else dict[str, object](boxed_pair="not in this installation")
    document["environment"] = {
        **versions(),
        "devices": ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in gpus)],
        "threads": torch.get_num_threads(),
    }
    return document
