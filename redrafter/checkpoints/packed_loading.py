"""Load models whose weights AWQ, GPTQ, compressed-tensors or torchao has packed, with transformers alone.

transformers finds, renames and merges the tensors, as for every checkpoint. Here is a quantizer for it that reads the
packed ones: those of linear layers become `GroupedLinear`, and others are dequantised.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.awq import AWQ_SCALES_MAPPINGS
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from redrafter.checkpoints.merged import find_file
from redrafter.errors import CheckpointError, warn
from redrafter.files.headers import INDEX_FILE, WEIGHTS_FILE, read_headers
from redrafter.model.linear_layers import quantization_of
from redrafter.model.packed_weights import Layout, find_layout, reason_of
from redrafter.model.quantized_layers import GroupedLinear

METHOD = "redrafter"  # our quantizer's name in transformers


def packed_arguments(name: str | Path, load: dict[str, Any], *, trust_remote_code: bool) -> dict[str, Any] | None:
    """Return arguments of transformers' `from_pretrained` with which a model's packed weights are read here.

    None for a model without such weights, or if `load` says how they are read by a `quantization_config`.

    Args:
        name: Directory or hub id of the model.
        load: The arguments that were given.
        trust_remote_code: Whether code in the checkpoint may run.
    """
    if "quantization_config" in load:  # also of a GGUF file
        return None
    names = "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"
    hub: dict[str, Any] = {key: load[key] for key in names if key in load}
    config: Any = load.get("config")
    if config is None:
        stored: dict[str, Any] = {}
        with suppress(OSError):  # an adapter, or a missing file, which transformers' error names
            stored, _ = PretrainedConfig.get_config_dict(str(name), **hub)
        if not any("quantization_config" in part for part in (stored, stored.get("text_config") or {})):
            return None
        config, load = AutoConfig.from_pretrained(
            str(name), return_unused_kwargs=True, trust_remote_code=trust_remote_code, **load
        )
    entries = quantization_of(config)
    if entries is None or find_layout(entries) is None:
        return None
    method, text = entries["quant_method"], config.get_text_config(decoder=True)
    files = (find_file(str(name), file, hub.get("revision")) for file in (WEIGHTS_FILE, INDEX_FILE))
    # Pickled objects of torchao, activations that AutoAWQ has scaled, and experts, whose weights transformers merges.
    experts = any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if (
        experts
        or (method == "torchao" and not any(files))
        or (method == "awq" and text.model_type in AWQ_SCALES_MAPPINGS)
    ):
        return None
    for part in (config, text):
        if getattr(part, "quantization_config", None):
            part.quantization_config = {"quant_method": METHOD, "entries": dict(entries)}
    return {**hub, **load, "config": config}


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Settings that transformers passes to `PackedQuantizer`.

    Attributes:
        entries: The `quantization_config` of the checkpoint.
        dequantize: True, so that the loaded model is no quantised one to transformers.
    """

    dequantize = True

    def __init__(self, quant_method: Any, entries: Mapping[str, Any]):
        """Hold the settings."""
        self.quant_method, self.entries = quant_method, entries


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Reads packed weights where transformers loads a model; the loaded model has no quantizer."""

    quantization_config: PackedConfig
    is_trainable = True

    def __init__(self, config: PackedConfig, **options: Any):
        """Find the layout of the weights."""
        super().__init__(config, **options)
        layout = find_layout(config.entries)
        assert layout is not None
        self.layout, self.one = layout, GroupOne(layout)

    def is_serializable(self) -> bool:
        """Return that transformers cannot save such a model as it was."""
        return False

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return what reads the weights of layers."""
        return [WeightConverter(list(self.layout.names), "weight", [self.one])]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        text = model.config.get_text_config(decoder=True)
        if hasattr(text, "quantization_config"):  # in a config of several parts
            del text.quantization_config
        # By which transformers would pack dequantised weights to save them.
        vars(model).pop("_weight_conversions", None)
        if self.one.wrong:
            name, reason = self.one.wrong[0]
            folder, layer = Path(str(model.name_or_path)), name.removesuffix("weight")
            held = read_headers(folder) if folder.is_dir() else {}
            file = next((header.file for key, header in held.items() if key.startswith(layer)), folder)
            raise CheckpointError(
                f"{file} cannot be read: the {self.quantization_config.entries['quant_method']} weight {name}: {reason}"
                "; download the checkpoint again, or quantise the model again"
            )
        if wide := self.one.wide:
            warn(
                f"{len(wide)} packed weights of {model.name_or_path}, such as {wide[0]}, are dequantised: their groups "
                "are permuted (desc_act, actorder) or of other sizes than multiples of 16"
            )
        return model


class GroupOne(ConversionOps):
    """Gives a linear layer its packed weight, as `GroupedLinear`.

    Attributes:
        wide: Names of weights that are dequantised, as no `GroupedWeight` can have their numbers.
        wrong: Names of weights that cannot be read, and the reasons.
    """

    hf_quantizer = True  # by which transformers knows that the tensors are not to be cast

    def __init__(self, layout: Layout):
        """Hold the layout."""
        self.layout, self.wide, self.wrong = layout, list[str](), list[tuple[str, str]]()

    def __deepcopy__(self, memo: object) -> "GroupOne":
        return self  # transformers copies it for each weight

    def convert(  # with transformers' arguments, all of which it passes
        self,
        input_dict: dict[str, Any],
        source_patterns: object = None,
        target_patterns: object = None,
        full_layer_name: str = "",
        model: Any = None,
        missing_keys: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the weight by name if it is dequantised; else put a new layer into the model, and return nothing."""
        tensors = {name: found[0] if isinstance(found, list) else found for name, found in input_dict.items()}
        meta, name = model.get_parameter(full_layer_name), full_layer_name.removesuffix(".weight")
        try:
            if tensors.keys() == {"weight"}:  # not packed
                return {full_layer_name: tensors["weight"].to(meta.dtype)}
            weight = self.layout.read(tensors)
            if weight.codes.shape != meta.shape:
                raise ValueError(f"its shape is {tuple(weight.codes.shape)} instead of {tuple(meta.shape)}")
            layer, tied = model.get_submodule(name), full_layer_name in getattr(model, "all_tied_weights_keys", {})
            fits = type(layer) is nn.Linear and not tied
            grouped = weight.grouped() if fits else None
            if grouped is None:
                self.wide += [full_layer_name] * fits
                return {full_layer_name: weight.dequantize().to(meta.dtype)}
        except (KeyError, RuntimeError, ValueError) as error:  # transformers' own message would not name the weight
            self.wrong.append((full_layer_name, reason_of(error)))
            missing_keys.discard(full_layer_name)  # which transformers would report at length
            return {}
        new: Any = GroupedLinear(layer, grouped)
        new._is_hf_initialized = new.weight._is_hf_initialized = True
        model.set_submodule(name, new)
        missing_keys.discard(full_layer_name)
        return {}
