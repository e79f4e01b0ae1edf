"""Tensors and configs of Llama and Qwen2 from Hugging Face's form to TensorRT-LLM's, and back.

Query, key and value are one tensor in TensorRT-LLM: each is split by heads, then a rank's shares are concatenated.
With fewer key heads than ranks, neighbouring ranks hold the same key head. `mlp.fc` is the gate projection, and
`mlp.gate` is the up projection.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from redrafter.convert.tensors import (
    LazyTensor,
    check_tensors,
    concat_columns,
    concat_rows,
    pad_rows,
    slice_columns,
    slice_rows,
)
from redrafter.convert.trtllm import check_tp, round_up
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, first_line

BASE_CONFIG_KEY = "redrafter_base_config"  # key of Hugging Face's config, for the way back
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "QWenForCausalLM": "qwen2",
    "ReDrafterForCausalLM": "llama",  # written by TensorRT-LLM's first converter, for Llama only
}
LAYER_PREFIX = "model.layers.{i}."
# TensorRT-LLM's name after "transformer.": Hugging Face's names, and how the tensor is split over the ranks. A layer
# that is split by columns has its whole bias on each rank.
TENSOR_RULES = {
    "vocab_embedding.weight": (("model.embed_tokens.weight",), "embedding"),
    "ln_f.weight": (("model.norm.weight",), "whole"),
    "layers.{i}.input_layernorm.weight": ((LAYER_PREFIX + "input_layernorm.weight",), "whole"),
    "layers.{i}.post_layernorm.weight": ((LAYER_PREFIX + "post_attention_layernorm.weight",), "whole"),
    **{
        f"layers.{{i}}.attention.qkv.{kind}": (tuple(f"{LAYER_PREFIX}self_attn.{x}_proj.{kind}" for x in "qkv"), "qkv")
        for kind in ("weight", "bias")
    },
    "layers.{i}.attention.dense.weight": ((LAYER_PREFIX + "self_attn.o_proj.weight",), "columns"),
    "layers.{i}.attention.dense.bias": ((LAYER_PREFIX + "self_attn.o_proj.bias",), "whole"),
    **{
        f"layers.{{i}}.mlp.{theirs}.{kind}": ((f"{LAYER_PREFIX}mlp.{ours}_proj.{kind}",), "rows")
        for theirs, ours in (("fc", "gate"), ("gate", "up"))
        for kind in ("weight", "bias")
    },
    "layers.{i}.mlp.proj.weight": ((LAYER_PREFIX + "mlp.down_proj.weight",), "columns"),
    "layers.{i}.mlp.proj.bias": ((LAYER_PREFIX + "mlp.down_proj.bias",), "whole"),
}
LM_HEAD = "lm_head.weight"  # the same name in both, padded as the drafter's head; absent if it is the embedding table


def _layer_rules(layers: int) -> dict[str, tuple[tuple[str, ...], str]]:
    rules = {}
    for trtllm_name, (hf_names, split) in TENSOR_RULES.items():
        for i in range(layers if "{i}" in trtllm_name else 1):
            rules["transformer." + trtllm_name.format(i=i)] = (tuple(name.format(i=i) for name in hf_names), split)
    return rules | {LM_HEAD: ((LM_HEAD,), "head")}


def check_base(config: PretrainedConfig, tensors: Mapping[str, LazyTensor], tp: int, directory: Path) -> None:
    """Check that a base can be written as a TensorRT-LLM checkpoint for `tp` ranks."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{directory} is a {config.model_type}; "
            f"a TensorRT-LLM checkpoint can be written for {', '.join(MODEL_TYPES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedError(f"{directory} has use_sliding_window, which TensorRT-LLM's Qwen2 does not")
    check_complete(
        config, {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}, directory
    )
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    check_tp(tp, {"num_attention_heads": heads, "intermediate_size": config.intermediate_size})
    if key_heads % tp and tp % key_heads:
        raise ArgumentError(f"--tp-size {tp} neither divides num_key_value_heads={key_heads} nor is a multiple of it")


def check_complete(config: PretrainedConfig, tensors: Mapping[str, LazyTensor], directory: Path) -> None:
    """Raise `CheckpointError` unless a model has exactly the tensors that its config asks for."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CheckpointError(f"{directory / 'config.json'} describes no model: {first_line(error)}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings and LM_HEAD not in tensors:
        expected.pop(LM_HEAD, None)
    check_tensors(expected, tensors, directory)


def split_base(
    tensors: Mapping[str, LazyTensor], config: PretrainedConfig, rank: int, tp: int
) -> dict[str, LazyTensor]:
    """Return one rank's part of a base, by TensorRT-LLM's names."""
    part = {}
    for trtllm_name, (hf_names, split) in _layer_rules(config.num_hidden_layers).items():
        if hf_names[0] not in tensors:
            continue  # a bias that the model does not have, or a tied head
        whole = tensors[hf_names[0]]
        if split == "qkv":
            heads, key_heads = config.num_attention_heads, config.num_key_value_heads
            query, key, value = (tensors[name] for name in hf_names)
            shares = [_slice_heads(query, heads, rank, tp)]
            shares += [_slice_heads(tensor, key_heads, rank, tp) for tensor in (key, value)]
            part[trtllm_name] = concat_rows(shares)
        elif split == "columns":
            share = whole.shape[1] // tp
            part[trtllm_name] = slice_columns(whole, rank * share, (rank + 1) * share)
        elif split in ("rows", "head"):
            whole = pad_rows(whole, round_up(whole.length, tp)) if split == "head" else whole
            share = whole.length // tp
            part[trtllm_name] = slice_rows(whole, rank * share, (rank + 1) * share)
        else:
            part[trtllm_name] = whole
    return part


def join_base(
    ranks: Sequence[Mapping[str, LazyTensor]], config: Mapping[str, Any], directory: Path
) -> dict[str, LazyTensor]:
    """Return the base's tensors by Hugging Face's names, put together from all ranks."""
    base: dict[str, LazyTensor] = {}
    rules, heads = _layer_rules(config["num_hidden_layers"]), config["num_attention_heads"]
    key_heads, tp = config.get("num_key_value_heads") or heads, len(ranks)
    if heads % tp or (key_heads % tp and tp % key_heads):
        raise CheckpointError(f"{directory} has {heads} heads and {key_heads} key heads, which {tp} ranks cannot share")
    if config.get("embedding_sharding_dim", 0) not in (0, 1):
        raise CheckpointError(
            f"{directory}: embedding_sharding_dim is 0 or 1, not {config['embedding_sharding_dim']!r}"
        )
    if unknown := [name for name in ranks[0] if name not in rules]:
        raise UnsupportedError(f"{directory} has {unknown[0]}, which is no tensor of a Llama or Qwen2")
    # The dimension that the embedding table is split along; None where each rank holds the whole table.
    embedding_dim = config.get("embedding_sharding_dim", 0) if config.get("use_parallel_embedding") else None
    for trtllm_name, (hf_names, split) in rules.items():
        if trtllm_name not in ranks[0]:
            continue
        parts, name = [rank[trtllm_name] for rank in ranks], hf_names[0]
        if split == "qkv":
            base |= dict(zip(hf_names, _join_qkv(parts, heads, key_heads), strict=True))
        elif split == "columns" or (split == "embedding" and embedding_dim == 1):
            base[name] = concat_columns(parts)
        elif split in ("rows", "head") or (split == "embedding" and embedding_dim == 0):
            base[name] = concat_rows(parts)
        else:
            base[name] = parts[0]
        if split in ("head", "embedding") and base[name].length == round_up(config["vocab_size"], tp):
            base[name] = slice_rows(base[name], 0, config["vocab_size"])
    return base


def _slice_heads(tensor: LazyTensor, heads: int, rank: int, tp: int) -> LazyTensor:
    width = tensor.length // heads
    first = rank * heads // tp
    return slice_rows(tensor, first * width, (first + max(heads // tp, 1)) * width)


def _join_qkv(parts: Sequence[LazyTensor], heads: int, key_heads: int) -> list[LazyTensor]:
    tp = len(parts)
    rank_heads, rank_key_heads = heads // tp, max(key_heads // tp, 1)
    width = parts[0].length // (rank_heads + 2 * rank_key_heads)
    holders = parts[:: max(tp // key_heads, 1)]  # one rank for each key head
    query = concat_rows([slice_rows(part, 0, rank_heads * width) for part in parts])
    key_start, value_start = rank_heads * width, (rank_heads + rank_key_heads) * width
    key, value = (
        concat_rows([slice_rows(part, start, start + rank_key_heads * width) for part in holders])
        for start in (key_start, value_start)
    )
    return [query, key, value]


def to_trtllm_config(config: PretrainedConfig, dtype: str, tp: int) -> dict[str, Any]:
    """Convert Hugging Face's config of a Llama or Qwen2 to TensorRT-LLM's for `tp` ranks of tensors in `dtype`."""
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
        BASE_CONFIG_KEY: {
            k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
        },
    }


def to_hf_config(config: Mapping[str, Any], tied: bool, directory: Path) -> PretrainedConfig:
    """Convert TensorRT-LLM's config of a base to Hugging Face's; `tied` says that the head is the embedding table."""
    try:
        if values := config.get(BASE_CONFIG_KEY):
            hf_config: PretrainedConfig = AutoConfig.for_model(**values)
            hf_config.dtype = config["dtype"]
            return hf_config
        architecture = config.get("base_model_architecture", config["architecture"])
        model_type = _ARCHITECTURES.get(architecture)
        if model_type is None or config.get("qwen_type", "qwen2") != "qwen2":
            kind = config.get("qwen_type", architecture)
            raise UnsupportedError(f"{directory} holds a {kind}; of TensorRT-LLM's, only Llama and Qwen2 can be read")
        scaling, width = dict(config.get("rotary_scaling") or {}), config.get("head_size")
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        rope = {"rope_type": kind, "rope_theta": config.get("rotary_base", 10000.0), **scaling}
        same_keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        biases = {"attention_bias": config.get("attn_bias", False), "mlp_bias": config.get("mlp_bias", False)}
        return AutoConfig.for_model(
            model_type,
            **{key: config[key] for key in same_keys},
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
        raise CheckpointError(f"{directory / 'config.json'} does not describe a base: {first_line(error)}") from error
