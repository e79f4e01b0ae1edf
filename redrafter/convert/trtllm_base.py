"""Tensors of Llama and Qwen2 from Hugging Face's names and layout to TensorRT-LLM's, and back.

Query, key and value are one tensor in TensorRT-LLM: each is split by heads, then a rank's shares are concatenated.
With fewer key heads than ranks, neighbouring ranks hold the same key head. `mlp.fc` is the gate projection, and
`mlp.gate` is the up projection.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from redrafter.checkpoints.headers import check_tensors
from redrafter.convert.tensors import LazyTensor, concat_columns, concat_rows, pad_rows, slice_columns, slice_rows
from redrafter.convert.trtllm import check_tp, round_up
from redrafter.convert.trtllm_base_config import MODEL_TYPES
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, first_line

__all__ = ["LM_HEAD", "check_base", "check_complete", "join_base", "split_base"]

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
    """Return the rules for all tensors of a model with so many layers."""
    rules = {}
    for trtllm_name, (hf_names, split) in TENSOR_RULES.items():
        for i in range(layers if "{i}" in trtllm_name else 1):
            rules["transformer." + trtllm_name.format(i=i)] = (tuple(name.format(i=i) for name in hf_names), split)
    return rules | {LM_HEAD: ((LM_HEAD,), "head")}


def check_base(config: PretrainedConfig, tensors: Mapping[str, LazyTensor], tp: int, directory: Path) -> None:
    """Check that a base can be written as a TensorRT-LLM checkpoint for a number of ranks.

    Args:
        config: The base's config.
        tensors: Its tensors by Hugging Face's names.
        tp: Number of ranks.
        directory: Where the base is, for error messages.

    Raises:
        UnsupportedError: When the format cannot hold the base.
        CheckpointError: When a tensor is missing, is not expected or has another shape.
        ArgumentError: When the base cannot be split over so many ranks.
    """
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{directory} is a {config.model_type}; "
            f"a TensorRT-LLM checkpoint can be written for {', '.join(MODEL_TYPES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedError(f"{directory} has use_sliding_window, which TensorRT-LLM's Qwen2 does not")
    check_complete(
        config, {name: x.shape for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}, directory
    )
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    check_tp(tp, {"num_attention_heads": heads, "intermediate_size": config.intermediate_size})
    if key_heads % tp and tp % key_heads:
        raise ArgumentError(f"--tp-size {tp} neither divides num_key_value_heads={key_heads} nor is a multiple of it")


def check_complete(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], directory: Path) -> None:
    """Raise `CheckpointError` unless a model has exactly the tensors that its config asks for.

    Args:
        config: Config of a Llama or Qwen2.
        shapes: Shapes of the tensors by Hugging Face's names.
        directory: Where the model is, for error messages.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise CheckpointError(f"{directory / 'config.json'} describes no model: {first_line(error)}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings and LM_HEAD not in shapes:
        expected.pop(LM_HEAD, None)
    check_tensors(expected, shapes, directory)


def split_base(
    tensors: Mapping[str, LazyTensor], config: PretrainedConfig, rank: int, tp: int
) -> dict[str, LazyTensor]:
    """Return one rank's part of a base, by TensorRT-LLM's names.

    Args:
        tensors: The base's tensors by Hugging Face's names.
        config: The base's config.
        rank: The rank.
        tp: Number of ranks.
    """
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
    """Return the base's tensors by Hugging Face's names, put together from all ranks.

    Args:
        ranks: The base's tensors on each rank, by TensorRT-LLM's names.
        config: TensorRT-LLM's config.
        directory: Where the checkpoint is, for error messages.

    Raises:
        CheckpointError: When the config does not fit the ranks.
        UnsupportedError: When a tensor belongs to no Llama or Qwen2.
    """
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
    embedding_dim = _embedding_split_dim(config)
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
    """Return the rows of one rank's heads."""
    width = tensor.length // heads
    first = rank * heads // tp
    return slice_rows(tensor, first * width, (first + max(heads // tp, 1)) * width)


def _join_qkv(parts: Sequence[LazyTensor], heads: int, key_heads: int) -> list[LazyTensor]:
    """Return query, key and value, put together from each rank's share of all three."""
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


def _embedding_split_dim(config: Mapping[str, Any]) -> int | None:
    """Return the dimension that the embedding table is split along, or None if each rank holds the whole table."""
    return config.get("embedding_sharding_dim", 0) if config.get("use_parallel_embedding") else None
