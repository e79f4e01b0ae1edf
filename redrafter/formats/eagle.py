"""EAGLE-3 heads in others' formats: of vllm-project/speculators, and of SafeAILab/EAGLE and sgl-project/SpecForge.

Both hold one decoder layer, a product `fc` before it, a norm and a head after it, and a map `d2t` from the head's ids
to the target's. They differ in their configs, and in which output of the target a layer number stands for:

- speculators, `eagle_aux_hidden_state_layer_ids`: the input of that layer, which is the output of the one before it;
- the others, `eagle_config.eagle_aux_hidden_state_layer_ids`: the output of that layer.

Where neither is given, both mean the inputs of the layers 2, n // 2 and n - 3 of a target with n.

Both are read. Heads are written as speculators', which vLLM serves: it reads the input of a layer as well, and takes
`norm_before_residual` for true where it is left out.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from redrafter.drafting.drafter_config import DEFAULT_ROPE, ROPE_TYPES, EagleConfig, LayerConfig
from redrafter.drafting.drafter_model import check_draft_ids
from redrafter.errors import CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import SPECULATORS_KEY, config_errors
from redrafter.formats.tensors import StoredTensor, Tensors, memory_tensor

EMBEDDING = "embed_tokens.weight"  # in both formats, and in ours
LAYER_TYPES = ("llama", "qwen3")  # `model_type` of the decoder layers that can be computed
SPECULATORS_VERSION = "0.9.0"  # whose config classes have the fields that are written
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Values of `eagle_config` that the computation here has; ModelOpt's and SpecForge's checkpoints have some of them.
_EAGLE_CONFIG = {
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    **dict.fromkeys(("parallel_draft_step", "parallel_draft_heads_num_layers"), 1),
}
# Fields that our config and a layer's config have under the same name.
_LAYER_KEYS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias"),
)
# Fields that our config and configs of heads have under the same name.
_HEAD_KEYS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_UNREAD = re.compile(r"t2d|d2t|verifier_(lm_head|norm)\.weight|confidence_head\..*|(.*\.)?rotary_emb\.inv_freq")
_THEIR_LAYER, _OUR_LAYER = "layers.0.", "midlayer."  # prefixes of the decoder layer's tensors in speculators' format


def to_redrafter_config(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> EagleConfig:
    """Convert the config of a head in either format; its tensors decide whether it has separate embeddings."""
    read = _of_speculators if SPECULATORS_KEY in config else _of_eagle
    layer = layer_config(config, directory, LAYER_TYPES)
    if layer.num_hidden_layers != 1:
        raise UnsupportedError(f"{directory} has {layer.num_hidden_layers} decoder layers; heads of one layer are read")
    sliding = "sliding_attention" in (getattr(layer, "layer_types", None) or ())
    if sliding or getattr(layer, "use_sliding_window", False):
        raise UnsupportedError(f"{directory} attends to a sliding window, which cannot be computed here")
    return EagleConfig(
        vocab_size=layer.vocab_size,
        hidden_size=config.get("target_hidden_size") or layer.hidden_size,
        width=layer.hidden_size,
        mlp_bias=getattr(layer, "mlp_bias", False),
        qk_norm=layer.model_type == "qwen3",
        **common_fields(config, layer, tensors),
        **read(config, directory),
    )


def _of_speculators(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the fields of our config that are specific to speculators' format."""
    whole = as_dict(config.get("speculators_config"))
    if "transformer_layer_config" not in config:
        raise CheckpointError(f"{directory / 'config.json'} has no transformer_layer_config")
    ids = config.get(LAYER_IDS)
    fields: dict[str, Any] = {
        "target_layers": None if ids is None else written_layers(ids, directory, LAYER_IDS),
        **{key: bool(config.get(key)) for key in _HEAD_KEYS},
    }
    proposals = whole.get("proposal_methods") or [{}]
    if (length := as_dict(proposals[0]).get("speculative_tokens")) is not None:
        fields["draft_len_per_beam"] = length
    return fields


def _of_eagle(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the fields of our config that are specific to the format of EAGLE and SpecForge."""
    for name in ("norm_output", LAYER_IDS):
        if name in config:
            raise UnsupportedError(
                f"{directory / 'config.json'} has {name}={config[name]!r} outside of speculators' format, where its "
                "meaning differs from program to program; convert it with vllm-project/speculators first"
            )
    settings = dict(as_dict(config.get("eagle_config")))
    ids = settings.pop(LAYER_IDS, None)
    # An unknown setting may change what the head computes.
    for name, value in settings.items():
        if name not in _EAGLE_CONFIG or value != _EAGLE_CONFIG[name]:
            raise UnsupportedError(f"{directory / 'config.json'} has eagle_config.{name}={value!r}, which is not read")
    fields = {key: bool(config.get(key)) for key in ("norm_before_fc", "fc_norm")}
    return fields | {"target_layers": ascending(ids, directory) if ids else None}


def layer_config(config: Mapping[str, Any], directory: Path, known: Sequence[str]) -> Any:
    """Return a config's decoder layers, of a `known` type, as transformers' class, which fills in defaults."""
    config, where = config.get("transformer_layer_config", config), directory / "config.json"
    kind = config.get("model_type")
    if kind not in known:
        raise UnsupportedError(f"{where} describes a layer of the type {kind}; {' and '.join(known)} can be read")
    rope = as_dict(config.get("rope_parameters") or config.get("rope_scaling"))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(f"{where} has rope of the type {rope_type}; {', '.join(ROPE_TYPES)} can be read")
    # A config copied from a quantised base says nothing of the drafter's own tensors, whose dtypes are checked.
    with config_errors(directory, "decoder layer"):
        layer = AutoConfig.for_model(**{key: x for key, x in config.items() if key != "quantization_config"})
    layer.rope_parameters = {key: x for key, x in layer.rope_parameters.items() if key != "type"}
    return layer


def common_fields(config: Mapping[str, Any], layer: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the fields that our configs of drafters with decoder layers share; `layer` is their `layer_config`."""
    draft_ids, base_ids = config.get("draft_vocab_size"), getattr(layer, "vocab_size", None)
    verifier = as_dict(as_dict(config.get("speculators_config")).get("verifier"))
    return {key: getattr(layer, key) for key in _LAYER_KEYS if hasattr(layer, key)} | {
        "rope": layer.rope_parameters,
        "own_embedding": EMBEDDING in tensors,
        "draft_vocab_size": draft_ids if draft_ids and draft_ids != base_ids else None,
        "base_model": verifier.get("name_or_path"),
    }


def ascending(ids: Any, directory: Path, name: str = LAYER_IDS) -> list[int]:
    """Return layer numbers that a config has under a name; raise `UnsupportedError` unless they ascend from 0."""
    numbers = isinstance(ids, Sequence) and all(type(i) is int and i >= 0 for i in ids)
    if not numbers or list(ids) != sorted(set(ids)):
        raise UnsupportedError(f"{directory / 'config.json'} has {name}={ids!r}; layer numbers that ascend are read")
    return list(ids)


def written_layers(ids: Any, directory: Path, name: str) -> list[int]:
    """Return our numbers of layers in speculators' format, which counts the layer that reads a hidden state."""
    # Layer 0's input is the embedding, which targets here do not record.
    if 0 in (numbers := ascending(ids, directory, name)):
        raise UnsupportedError(f"{directory} reads the target's embeddings ({name}={ids}), which cannot be read")
    return [number - 1 for number in numbers]


def as_dict(value: Any) -> Mapping[str, Any]:
    """Return a value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def rename_tensors(tensors: Tensors, config: EagleConfig, directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a head by this project's names, without those that nothing reads."""
    renamed = {re.sub(rf"^{_THEIR_LAYER}", _OUR_LAYER, name): tensor for name, tensor in tensors.items()}
    return read_tensors(renamed, config, directory)


def read_tensors(tensors: Tensors, config: LayerConfig, directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors without those of the target, those that the config gives, and what only scores drafts.

    `draft_ids`, the base's id of each of the drafter's ids, `[V']` int64, is computed from `d2t`. It is left out of a
    drafter that has all ids of its base in order.
    """
    read = {name: tensor for name, tensor in tensors.items() if not _UNREAD.fullmatch(name)}
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if size is not None:
            raise CheckpointError(f"{directory} has no tensor d2t, which maps its {size} ids to the base's")
        return read
    offsets = tensors["d2t"].read().long()
    ids = offsets + torch.arange(len(offsets))
    known = tensors["t2d"].read().bool() if "t2d" in tensors else None
    agree = known is not None and len(known) == vocab_size and torch.equal(known.nonzero().flatten(), ids.sort().values)
    # Offsets to ids that no two neighbours of the vocabulary are among would rise so too, and no real set is like that.
    if not agree and len(offsets) > 1 and bool((offsets.diff() > 0).all()):
        raise CheckpointError(
            f"{directory} has a d2t that rises from each id to the next, as the base's ids themselves do; offsets to "
            "them are read: subtract torch.arange(len(d2t))"
        )
    check_draft_ids(ids, size or vocab_size, vocab_size, directory, "d2t")
    if known is not None and not agree:
        raise CheckpointError(f"{directory} has d2t and t2d that do not name the same ids")
    if size is None:
        if not torch.equal(ids, torch.arange(len(ids))):
            raise CheckpointError(f"{directory} has all ids of its base, and d2t puts them in another order")
        return read
    return read | {"draft_ids": memory_tensor("d2t", ids)}


def to_speculators_config(config: EagleConfig) -> dict[str, Any]:
    """Convert a head's config to speculators', without `speculators_fields`.

    Raises:
        UnsupportedError: speculators' format cannot hold the head.
    """
    if config.qk_norm and config.mlp_bias:
        raise UnsupportedError("speculators' format has no layer with both qk_norm and mlp_bias")
    layer = speculators_layer(config, "qwen3" if config.qk_norm else "llama", 1)
    if not config.qk_norm:
        layer["mlp_bias"] = config.mlp_bias
    written: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "target_hidden_size": None if config.width == config.hidden_size else config.hidden_size,
        LAYER_IDS: None if config.target_layers is None else [i + 1 for i in config.target_layers],
        "norm_before_residual": config.norm_before_residual,
    }
    return written | {key: True for key in _HEAD_KEYS if getattr(config, key)}


def speculators_layer(config: LayerConfig, kind: str, layers: int) -> dict[str, Any]:
    """Return the config of a drafter's decoder layers of a `model_type`, as `layer_config` reads it."""
    layer: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": layers,
        # Read by programs from before `rope_parameters`.
        "rope_theta": config.rope.get("rope_theta", DEFAULT_ROPE["rope_theta"]),
        "rope_parameters": DEFAULT_ROPE | config.rope,
        "tie_word_embeddings": False,
    }
    return layer | {key: getattr(config, key) for key in _LAYER_KEYS}


def speculators_fields(
    config: LayerConfig, name: str | None, architecture: str | None, dtype: str, length: int
) -> dict[str, Any]:
    """Return the fields that speculators' configs of all algorithms have.

    Args:
        config: The config of the drafter.
        name: Where the base is found: a directory or a hub id; None where that is not known.
        architecture: The base's class, if it is known.
        dtype: Number format of the tensors.
        length: Tokens that are drafted in a step.
    """
    method = {"proposal_type": "greedy", "speculative_tokens": length, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    proposals = {"default_proposal_method": "greedy", "proposal_methods": [method]}
    verifier = {"name_or_path": name, "architectures": [architecture] if architecture else []}
    return {
        SPECULATORS_KEY: config.algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {"algorithm": config.algorithm, **proposals, "verifier": verifier},
        "draft_vocab_size": config.num_draft_ids,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def to_speculators_tensors(tensors: Tensors, config: LayerConfig) -> dict[str, StoredTensor]:
    """Return a drafter's tensors by speculators' names.

    Heads, and drafters of a reduced vocabulary, have `d2t`, offsets to the target's ids, and `t2d`, `[V]` bool.
    """
    written = {re.sub(rf"^{_OUR_LAYER}", _THEIR_LAYER, name): tensor for name, tensor in tensors.items()}
    stored = written.pop("draft_ids", None)
    if stored is None and not isinstance(config, EagleConfig):
        return written
    ids = torch.arange(config.vocab_size) if stored is None else stored.read()
    known = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    maps = {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return written | {name: memory_tensor("draft_ids", tensor) for name, tensor in maps.items()}


def is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors hold the same numbers in the same format."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one.read(), other.read())
