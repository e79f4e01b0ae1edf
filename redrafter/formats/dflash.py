"""DFlash, DFlash2 and DSpark drafters in the formats of z-lab, DeepSpec, speculators and transformers.

All hold `fc` and `hidden_norm`, decoder layers, and a norm. They differ in where their configs say what, and in which
output of the target a layer number refers to: the layer's input in speculators' format, its output in all others. All
are read; drafters are written in speculators' format, which vLLM serves.

| | z-lab | DeepSpec | speculators | transformers |
|---|---|---|---|---|
| identified by | `dflash_config` | `DSpark` in `architectures` | `speculators_model_type` | `model_type` |
| fields | in `dflash_config`, or at the top | at the top | at the top | at the top |
| a layer's config | at the top | at the top | `transformer_layer_config` | at the top |
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import SPECULATORS_KEY
from redrafter.formats.eagle import (
    as_dict,
    ascending,
    common_fields,
    layer_config,
    read_tensors,
    speculators_layer,
    written_layers,
)
from redrafter.formats.tensors import StoredTensor, Tensors

HEAD = "lm_head.weight"
SPECULATORS_LAYERS = "aux_hidden_state_layer_ids"  # in speculators' format
LAYER_TYPES = ("qwen3", "muse_glimmer_assistant")  # whose decoder layers have the same tensors and formulas
MARKOV = "markov_head.markov_w1.weight"
# Fields of our config, and their names in the formats, at the top or in `dflash_config`.
_FIELDS = {
    **{name: name for name in ("block_size", "mask_token_id", "markov_rank", "conv_kernel_size", "conv_group_size")},
    **{"selector_rank": "selector_rank", "selector_top_k": "selector_top_k", "markov_type": "markov_head_type"},
    **{"embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier"},
    "logit_softcap": "final_logit_softcapping",
}
# Those that only drafters with a part have, and the part of its tensors' names; other drafters' values say nothing.
_PARTS = {"markov_rank": "markov_head.", **dict.fromkeys(("selector_rank", "selector_top_k"), "candidate_selector.")}
_PARTS |= dict.fromkeys(("conv_kernel_size", "conv_group_size"), "_conv.base_kernel")
# Keys of `dflash_config` that are read below too, or say nothing that the tensors do not.
_KNOWN = {
    *_FIELDS.values(),
    *("target_layer_ids", "num_target_layers", "sample_from_anchor", "shift_label", "is_causal", "causal"),
    *("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov", "projector_type", "num_anchors"),
}
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
_TRANSFORMERS_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def to_redrafter_config(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> DFlashConfig:
    """Convert the config of a drafter in any of the formats; its tensors decide which parts it has."""
    where, settings = directory / "config.json", as_dict(config.get("dflash_config"))
    if unknown := sorted(key for key in settings if key not in _KNOWN):
        raise UnsupportedError(f"{where} has dflash_config.{unknown[0]}={settings[unknown[0]]!r}, which is not read")

    # Publishers write the same fields at either level.
    values = {name: x for level in (config, settings) for name, x in level.items() if x is not None}
    layer = layer_config(config, directory, LAYER_TYPES)
    kinds = getattr(layer, "layer_types", None) or ()
    sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    window, has = getattr(layer, "sliding_window", None), tensors.__contains__
    if window is not None and layer.model_type != "qwen3":
        window += 1  # transformers' bidirectional window does not count the position itself
    common = common_fields(config, layer, tensors)
    if not has(HEAD):  # it uses the base's, which has all ids
        common["draft_vocab_size"] = None
    of_parts = {field: part for field, part in _PARTS.items() if any(part in name for name in tensors)}
    read = {field: name for field, name in _FIELDS.items() if field not in _PARTS or field in of_parts}
    fields = {field: values[name] for field, name in read.items() if name in values}
    fields["vocab_size"] = getattr(layer, "vocab_size", None) or values.get("vocab_size")
    for field in ("vocab_size", "block_size", "mask_token_id", *of_parts):
        if fields.get(field) is None:
            raise CheckpointError(f"{where} has no {field}, neither at the top nor in dflash_config")
    return DFlashConfig(
        hidden_size=layer.hidden_size,
        num_layers=layer.num_hidden_layers,
        target_layers=_target_layers(values, layer.num_hidden_layers, directory),
        sample_from_anchor=bool(
            values.get("sample_from_anchor", values.get("shift_label", _is_dspark(config, tensors)))
        ),
        sliding_layers=sliding,
        sliding_window=window if sliding else None,
        causal=_causal(values, "conv_kernel_size" in of_parts),
        own_head=has(HEAD),
        **common,
        **fields,
    )


def _is_dspark(config: Mapping[str, Any], tensors: Tensors) -> bool:
    """Return whether a drafter is a DSpark drafter, whose blocks draft from the pending token's position on."""
    names = (*(config.get("architectures") or ()), config.get(SPECULATORS_KEY))
    return MARKOV in tensors or any("dspark" in str(name).lower() for name in names)


def _causal(values: Mapping[str, Any], convolved: bool) -> str:
    """Return in which layers positions see no later ones of their block, as the format has it."""
    causal = values.get("is_causal", values.get("causal"))
    if causal is not None:
        return "all" if causal else "none"
    if SPECULATORS_KEY in values:
        later = values.get("sliding_window_non_causal", values[SPECULATORS_KEY] == "dflash2")
        return "none" if later else "sliding"
    return "sliding" if convolved else "none"


def _target_layers(values: Mapping[str, Any], layers: int, directory: Path) -> list[int]:
    """Return the target's layers whose outputs are read; those that z-lab's code chooses where none are named."""
    if SPECULATORS_KEY in values:
        return written_layers(values.get(SPECULATORS_LAYERS), directory, SPECULATORS_LAYERS)
    ids, count = values.get("target_layer_ids"), values.get("num_target_layers")
    # The default of DFlash's own code: evenly spaced layers, without the first and the last ones.
    if ids is None and type(count) is int:
        last = max(layers - 1, 1)
        ids = [count // 2] if layers == 1 else [round(1 + i * (count - 4) / last) for i in range(layers)]
    return ascending(ids, directory, "target_layer_ids")


def rename_tensors(tensors: Tensors, config: DFlashConfig, directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a drafter by this project's names, without those that nothing reads."""
    renamed = {_TRANSFORMERS_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    return read_tensors(renamed, config, directory)


def to_speculators_config(config: DFlashConfig) -> dict[str, Any]:
    """Convert a drafter's config to speculators', without `eagle.speculators_fields`.

    Raises:
        UnsupportedError: speculators' format cannot hold the drafter.
    """
    everywhere = len(config.sliding_layers) == config.num_layers
    defaults = {"mlp_bias": False, "embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None}
    if config.algorithm == "dflash2":
        defaults["sample_from_anchor"] = False
    differing = [field for field, value in defaults.items() if getattr(config, field) != value]
    if config.causal == "all" and not everywhere:
        differing.append("causal")
    # Layers of all positions always see later ones of their block, and sliding ones may.
    if differing:
        value = getattr(config, differing[0])
        raise UnsupportedError(f"speculators' format has no {config.algorithm} drafter with {differing[0]}={value!r}")
    if config.markov_rank and config.selector_rank:
        raise UnsupportedError("speculators' format has no drafter with both a Markov head and a selector")
    layer = speculators_layer(config, "qwen3", config.num_layers)
    kinds = ("sliding_attention" if i in config.sliding_layers else "full_attention" for i in range(config.num_layers))
    layer |= {
        "layer_types": list(kinds),
        "use_sliding_window": bool(config.sliding_layers),
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if config.sliding_layers else config.num_layers,
    }
    written = {
        "architectures": [_ARCHITECTURES[config.algorithm]],
        "transformer_layer_config": layer,
        SPECULATORS_LAYERS: [layer + 1 for layer in config.target_layers],
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.causal == "none",
    }
    if config.markov_rank:
        written |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    left_out = {*defaults} if config.markov_rank else {*defaults, "markov_type"}
    values = {name: getattr(config, field) for field, name in _FIELDS.items() if field not in left_out}
    return written | {name: value for name, value in values.items() if value is not None}
