"""Read LoRA adapters in PEFT's format from directories, without PEFT."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from redrafter.errors import ArgumentError, CheckpointError
from redrafter.files.checkpoint_kind import read_json
from redrafter.files.stored_tensors import read_pickle, read_safetensors
from redrafter.model.lora import LoraWeights, adapter_refusal, merge_into

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."  # of the names of weights, before the model's own

# Fields of a config that do not affect the output: they record how the adapter was found, trained or initialized.
_NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "peft_type", "peft_version", "revision"),
    *("runtime_config", "target_modules", "task_type", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
}
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"})
# Initializations that do not change the model's own weights. Others make PEFT change them at loading.
_SUPPORTED_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


def read_adapter(path: str | Path) -> LoraWeights:
    """Read a LoRA adapter from the directory that PEFT's `save_pretrained` wrote.

    Raises:
        CheckpointError: A file is missing, cannot be read, or holds what does not belong there.
        UnsupportedError: The adapter is more than LoRA on linear layers; the message names the unsupported part.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the one that PEFT's save_pretrained wrote")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path} has no {CONFIG_FILE}; give the directory that PEFT's save_pretrained wrote")
    config = read_json(folder / CONFIG_FILE)
    _check_config(path, config)
    pairs = _pairs(path, _read_tensors(folder)).items()
    # In FP32, and with the scaling folded into B, so that no precision is lost and no factor is needed later.
    layers = {name: (a.float(), b.float() * _scaling(path, config, name, len(a))) for name, (a, b) in pairs}
    for name, pair in layers.items():
        if not all(bool(tensor.isfinite().all()) for tensor in pair):
            raise CheckpointError(f"{path} holds numbers that are not finite, in {name}")
    return LoraWeights(str(path), layers)


def merge_adapter(model: nn.Module, path: str | Path) -> None:
    """Add the LoRA adapter in a directory to the weights of a model, in place and for good."""
    merge_into(model, read_adapter(path))


def _check_config(path: str | Path, config: Mapping[str, object]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise adapter_refusal(path, f"it is a {kind} adapter, and only LORA is computed for each row by itself")
    if config.get("bias", "none") != "none":
        raise adapter_refusal(path, f"bias={config['bias']!r} changes the model's own biases")
    beginning = config.get("init_lora_weights", True)
    if beginning not in _SUPPORTED_BEGINNINGS:
        raise adapter_refusal(
            path, f"init_lora_weights={beginning!r} changes the model's own weights (PEFT can save it as plain LoRA)"
        )
    # An unknown setting that is on may change what the adapter computes.
    for name, value in config.items():
        if name not in _NEUTRAL | _READ and value:
            raise adapter_refusal(path, f"it has {name}={value!r}, which is more than LoRA on linear layers")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = next((folder / name for name in WEIGHTS_FILES if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {' and no '.join(WEIGHTS_FILES)}")
    return read_safetensors([file]) if file.suffix == ".safetensors" else read_pickle(file)


def _pairs(path: str | Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A `[r, in]` and B `[out, r]` by the name of their layer in the model."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"(?:{re.escape(PREFIX)})?(.+)\.lora_([AB])\.weight", key)
        if match is None:
            raise adapter_refusal(path, f"it holds {key}, which is not a LoRA weight of a linear layer")
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise CheckpointError(f"{path} holds no weights")
    for name, half in halves.items():
        if len(half) < 2:
            raise CheckpointError(f"{path} has no {PREFIX}{name}.lora_{'B' if 'A' in half else 'A'}.weight")
        a, b = half["A"], half["B"]
        if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] > 0:
            raise CheckpointError(
                f"{path} has a lora_A of shape {list(a.shape)} and a lora_B of shape {list(b.shape)} for {name}, "
                "which cannot be multiplied"
            )
    return {name: (half["A"], half["B"]) for name, half in halves.items()}


def _scaling(path: str | Path, config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return the multiplier of a layer's product: alpha / r, or alpha / sqrt(r) of rsLoRA."""
    asked = _of_pattern(config.get("rank_pattern") or {}, name, config.get("r"))
    alpha = _of_pattern(config.get("alpha_pattern") or {}, name, config.get("lora_alpha"))
    if asked != rank:
        raise CheckpointError(f"{path} has weights of rank {rank} for {name}, where its {CONFIG_FILE} says {asked}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path} has no number lora_alpha in its {CONFIG_FILE}, but {alpha!r}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(patterns: Mapping[str, object], name: str, default: object) -> object:
    """Return the value of the first pattern that a layer's name, or the end of it, matches, as PEFT looks it up."""
    try:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
    except re.error as error:
        raise ArgumentError(f"a pattern of {CONFIG_FILE} is not a regular expression: {error}") from error
