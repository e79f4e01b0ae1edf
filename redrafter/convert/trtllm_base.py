"""Llama and Qwen2 in TensorRT-LLM's names and back.

Query, key and value are one tensor there: each is split by heads, then a rank's shares are put together; where there
are fewer key heads than ranks, neighbours hold the same one. `mlp.fc` is the gate and `mlp.gate` the up projection.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from redrafter.checkpoints.headers import check_tensors
from redrafter.convert.tensors import Stored, beside, columns, joined, padded, rows
from redrafter.convert.trtllm import check_tp, rounded
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, first_line

__all__ = ["HEAD", "base_config", "base_part", "check_base", "check_whole", "hf_config", "whole_base"]

OWN = "redrafter_base_config"  # Hugging Face's config, whole, for the way back
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "QWenForCausalLM": "qwen2",
    "ReDrafterForCausalLM": "llama",  # what their first converter wrote, for Llama alone
}

LAYER = "model.layers.{i}."
# Their name, behind "transformer.": ours, and how it is split. Biases of row-parallel layers are whole on each rank.
RULES = {
    "vocab_embedding.weight": (("model.embed_tokens.weight",), "embedding"),
    "ln_f.weight": (("model.norm.weight",), "whole"),
    "layers.{i}.input_layernorm.weight": ((LAYER + "input_layernorm.weight",), "whole"),
    "layers.{i}.post_layernorm.weight": ((LAYER + "post_attention_layernorm.weight",), "whole"),
    **{
        f"layers.{{i}}.attention.qkv.{kind}": (tuple(f"{LAYER}self_attn.{x}_proj.{kind}" for x in "qkv"), "qkv")
        for kind in ("weight", "bias")
    },
    "layers.{i}.attention.dense.weight": ((LAYER + "self_attn.o_proj.weight",), "columns"),
    "layers.{i}.attention.dense.bias": ((LAYER + "self_attn.o_proj.bias",), "whole"),
    **{
        f"layers.{{i}}.mlp.{theirs}.{kind}": ((f"{LAYER}mlp.{ours}_proj.{kind}",), "rows")
        for theirs, ours in (("fc", "gate"), ("gate", "up"))
        for kind in ("weight", "bias")
    },
    "layers.{i}.mlp.proj.weight": ((LAYER + "mlp.down_proj.weight",), "columns"),
    "layers.{i}.mlp.proj.bias": ((LAYER + "mlp.down_proj.bias",), "whole"),
}
HEAD = "lm_head.weight"  # the same in both, padded as the drafter's; absent where it is the embedding table


def _pairs(layers: int) -> dict[str, tuple[tuple[str, ...], str]]:
    """The rules for a number of layers."""
    found = {}
    for theirs, (ours, how) in RULES.items():
        for i in range(layers if "{i}" in theirs else 1):
            found["transformer." + theirs.format(i=i)] = (tuple(name.format(i=i) for name in ours), how)
    return found | {HEAD: ((HEAD,), "head")}


def check_base(config: PretrainedConfig, tensors: Mapping[str, Stored], tp: int, place: Path) -> None:
    """Raise `UnsupportedError` for a base that their format cannot hold, `CheckpointError` for one that is not whole,
    and `ArgumentError` for a tp that does not divide it."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{place} is a {config.model_type}; a TensorRT-LLM checkpoint can be written for {', '.join(MODEL_TYPES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedError(f"{place} has use_sliding_window, which TensorRT-LLM's Qwen2 does not")
    check_whole(
        config, {name: x.shape for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}, place
    )
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    check_tp(tp, {"num_attention_heads": heads, "intermediate_size": config.intermediate_size})
    if key_heads % tp and tp % key_heads:
        raise ArgumentError(f"--tp-size {tp} neither divides num_key_value_heads={key_heads} nor is a multiple of it")


def check_whole(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], place: Path) -> None:
    """Raise `CheckpointError` unless a Llama's or Qwen2's tensors are those that its config asks for."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CheckpointError(f"{place / 'config.json'} describes no model: {first_line(error)}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings and HEAD not in shapes:
        expected.pop(HEAD, None)
    check_tensors(expected, shapes, place)


def base_part(tensors: Mapping[str, Stored], config: PretrainedConfig, rank: int, tp: int) -> dict[str, Stored]:
    """What one rank holds of a base."""
    found = {}
    for theirs, (ours, how) in _pairs(config.num_hidden_layers).items():
        if ours[0] not in tensors:
            continue  # a bias that there is not, or a tied head
        parts = [tensors[name] for name in ours]
        if how == "qkv":
            heads, key_heads = config.num_attention_heads, config.num_key_value_heads
            mine = [_heads(parts[0], heads, rank, tp), *(_heads(part, key_heads, rank, tp) for part in parts[1:])]
            found[theirs] = joined(mine)
        elif how == "columns":
            share = parts[0].shape[1] // tp
            found[theirs] = columns(parts[0], rank * share, (rank + 1) * share)
        elif how in ("rows", "head"):
            whole = padded(parts[0], rounded(parts[0].length, tp)) if how == "head" else parts[0]
            share = whole.length // tp
            found[theirs] = rows(whole, rank * share, (rank + 1) * share)
        else:
            found[theirs] = parts[0]
    return found


def whole_base(ranks: Sequence[Mapping[str, Stored]], config: Mapping[str, Any], place: Path) -> dict[str, Stored]:
    """The base's tensors by Hugging Face's names, put together."""
    found: dict[str, Stored] = {}
    pairs, heads = _pairs(config["num_hidden_layers"]), config["num_attention_heads"]
    key_heads, tp = config.get("num_key_value_heads") or heads, len(ranks)
    if heads % tp or (key_heads % tp and tp % key_heads):
        raise CheckpointError(f"{place} has {heads} heads and {key_heads} key heads, which {tp} ranks cannot share")
    if config.get("embedding_sharding_dim", 0) not in (0, 1):
        raise CheckpointError(f"{place}: embedding_sharding_dim is 0 or 1, not {config['embedding_sharding_dim']!r}")
    if unknown := [name for name in ranks[0] if name not in pairs]:
        raise UnsupportedError(f"{place} has {unknown[0]}, which is no tensor of a Llama or Qwen2")
    for theirs, (ours, how) in pairs.items():
        if theirs not in ranks[0]:
            continue
        parts = [each[theirs] for each in ranks]
        if how == "qkv":
            found |= dict(zip(ours, _split(parts, heads, key_heads), strict=True))
        elif how == "columns" or (how == "embedding" and _split_embedding(config) == 1):
            found[ours[0]] = beside(parts)
        elif how in ("rows", "head") or (how == "embedding" and _split_embedding(config) == 0):
            found[ours[0]] = joined(parts)
        else:
            found[ours[0]] = parts[0]
        if how in ("head", "embedding") and found[ours[0]].length == rounded(config["vocab_size"], tp):
            found[ours[0]] = rows(found[ours[0]], 0, config["vocab_size"])
    return found


def _heads(tensor: Stored, heads: int, rank: int, tp: int) -> Stored:
    """The heads of one rank."""
    width = tensor.length // heads
    first = rank * heads // tp
    return rows(tensor, first * width, (first + max(heads // tp, 1)) * width)


def _split(parts: Sequence[Stored], heads: int, key_heads: int) -> list[Stored]:
    """Query, key and value, from what the ranks hold of them together."""
    tp = len(parts)
    mine, theirs = heads // tp, max(key_heads // tp, 1)
    width = parts[0].length // (mine + 2 * theirs)
    holders = parts[:: max(tp // key_heads, 1)]  # of each key head one
    query = joined([rows(part, 0, mine * width) for part in parts])
    starts = (mine * width, (mine + theirs) * width)
    return [query, *(joined([rows(part, at, at + theirs * width) for part in holders]) for at in starts)]


def _split_embedding(config: Mapping[str, Any]) -> int | None:
    return config.get("embedding_sharding_dim", 0) if config.get("use_parallel_embedding") else None


def base_config(config: PretrainedConfig, dtype: str, tp: int) -> dict[str, Any]:
    """Their config of a Llama or Qwen2."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    qwen = config.model_type == "qwen2"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "architecture": MODEL_TYPES[config.model_type],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": head_size,
        "hidden_act": config.hidden_act,
        "intermediate_size": config.intermediate_size,
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_embedding_dim": head_size,
        "rotary_base": theta,
        "rotary_scaling": None if kind == "default" else rope | {"type": kind},
        "qk_layernorm": False,
        "attn_bias": qwen or getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "tie_word_embeddings": config.tie_word_embeddings,
        **({"qwen_type": "qwen2"} if qwen else {}),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp, "gpus_per_node": 8, "cp_size": 1, "tp_size": tp, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": None},
        OWN: {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")},
    }


def hf_config(config: Mapping[str, Any], tied: bool, place: Path) -> PretrainedConfig:
    """Hugging Face's config of their base. tied: whether the head is the embedding table."""
    try:
        if own := config.get(OWN):
            found: PretrainedConfig = AutoConfig.for_model(**own)
            found.dtype = config["dtype"]
            return found
        architecture = config.get("base_model_architecture", config["architecture"])
        model_type = _ARCHITECTURES.get(architecture)
        if model_type is None or config.get("qwen_type", "qwen2") != "qwen2":
            kind = config.get("qwen_type", architecture)
            raise UnsupportedError(f"{place} holds a {kind}; of TensorRT-LLM's, only Llama and Qwen2 can be read")
        scaling, width = dict(config.get("rotary_scaling") or {}), config.get("head_size")
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        rope = {"rope_type": kind, "rope_theta": config.get("rotary_base", 10000.0), **scaling}
        same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        biases = {"attention_bias": config.get("attn_bias", False), "mlp_bias": config.get("mlp_bias", False)}
        return AutoConfig.for_model(
            model_type,
            **{key: config[key] for key in same},
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            hidden_act=config.get("hidden_act", "silu"),
            bos_token_id=None,
            eos_token_id=None,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rms_norm_eps=config.get("norm_epsilon", 1e-5),
            rope_parameters=rope,
            tie_word_embeddings=tied,
            dtype=config["dtype"],
            architectures=[MODEL_TYPES[model_type]],
            **(biases if model_type == "llama" else {}),
            **({"head_dim": width} if width and width * config["num_attention_heads"] != config["hidden_size"] else {}),
        )
    except UnsupportedError:
        raise
    except Exception as error:  # transformers checks some of it, with errors of its own
        raise CheckpointError(f"{place / 'config.json'} does not describe a base: {first_line(error)}") from error
