"""TensorRT-LLM's ReDrafter checkpoints: `config.json` and a `rank{r}.safetensors` for each of `tp_size` ranks.

A rank's file holds its part of the base, which is a Llama or Qwen2, and of the drafter. The embedding table and norms
are on each rank whole; heads are padded with rows of zeros to a multiple of `tp_size`. Every tensor of the drafter is
split along its rows, biases too; its names are this project's after `drafter.`. Of the base, query, key and value are
one tensor: each is split by heads, then a rank's shares are concatenated. With fewer key heads than ranks, neighbouring
ranks hold the same key head. `mlp.fc` is the gate projection, and `mlp.gate` is the up projection.

The backend that read these checkpoints was removed in 2026, so the format does not change any more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from redrafter.checkpoints.merged import Defaults
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError
from redrafter.files.checkpoint_kind import config_errors, read_json
from redrafter.files.headers import read_file_headers
from redrafter.formats.apple import UNUSED_NORM
from redrafter.formats.tensors import StoredTensor, Tensors, check_tensors, concat, pad_rows, stored_tensors
from redrafter.tree.sizes import TreeShape

MAX_RANKS = 4096
DRAFTER_PREFIX = "drafter."
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Keys of this project's config and of Hugging Face's, for the way back; TensorRT-LLM ignores keys unknown to it.
DRAFTER_CONFIG_KEY, BASE_CONFIG_KEY = "redrafter_drafter_config", "redrafter_base_config"
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Architecture of a base: `model_type`, and the architecture of the pair.
_ARCHITECTURES = {
    "LlamaForCausalLM": ("llama", "ReDrafterForLLaMALM"),
    "QWenForCausalLM": ("qwen2", "ReDrafterForQWenLM"),
    "Qwen2ForCausalLM": ("qwen2", "ReDrafterForQWenLM"),
}
_FIRST_PAIRS = "ReDrafterForCausalLM"  # written by TensorRT-LLM's first converter, for Llama only

# Types of the keys that are used here.
_NAMES, _NUMBERS = ("architecture", "dtype"), ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED: dict[str, type] = dict.fromkeys(_NAMES, str) | dict.fromkeys(_NUMBERS, int)
_TYPES = _REQUIRED | {
    "base_model_architecture": str,
    "redrafter_greedy_search": bool,
    **dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_size"), int),
    **dict.fromkeys(("redrafter_num_beams", "redrafter_draft_len_per_beam"), int),
    **dict.fromkeys(("mapping", "quantization", "rotary_scaling", DRAFTER_CONFIG_KEY, BASE_CONFIG_KEY), dict),
}
_TYPE_NAMES = {int: "a positive integer", str: "a string", dict: "an object", bool: "true or false"}
# Keys of a drafter's config, and TensorRT-LLM's.
_DRAFTER_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "redrafter_hidden_size",
    "exit_dim": "redrafter_exit_dim",
    "num_draft_layers": "redrafter_num_layers",
    "rnn": "redrafter_is_rnn",
}
# Keys of Hugging Face's config, and TensorRT-LLM's; some have a value where TensorRT-LLM's config has none.
_SAME_KEYS = (*_NUMBERS, "num_key_value_heads", "intermediate_size", "hidden_act", "max_position_embeddings")
_BASE_KEYS = {key: key for key in _SAME_KEYS} | {"rms_norm_eps": "norm_epsilon"}
_LEFT_OUT = ("transformers_version", "_name_or_path")  # of configs that are kept for the way back
_BASE_DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "norm_epsilon": 1e-5}

# TensorRT-LLM's names, Hugging Face's, and the dimension by which ranks split a tensor; None where each has it whole.
_TABLES: tuple[tuple[str, str, int | None], ...] = (
    ("transformer.vocab_embedding", "model.embed_tokens", None),
    ("transformer.ln_f", "model.norm", None),
    ("lm_head", "lm_head", 0),
)
_LAYERS: tuple[tuple[str, str, int | None], ...] = (
    ("input_layernorm", "input_layernorm", None),
    ("post_layernorm", "post_attention_layernorm", None),
    ("attention.qkv", "self_attn", 0),  # three tensors, split by heads
    ("attention.dense", "self_attn.o_proj", 1),
    ("mlp.fc", "mlp.gate_proj", 0),
    ("mlp.gate", "mlp.up_proj", 0),
    ("mlp.proj", "mlp.down_proj", 1),
)


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint, and check the types of the keys that are used here."""
    file = directory / "config.json"
    config = read_json(file)
    for key, kind in _TYPES.items():
        value = config.get(key)
        fits = type(value) is kind and (type(value) is not int or 0 < value < 2**31)
        if not fits and (value is not None or key in _REQUIRED):
            raise CheckpointError(f"{file}: {key} must be {_TYPE_NAMES[kind]}, got {value!r}")
    mapping = config.get("mapping") or {}
    for key in ("tp_size", "pp_size"):
        # Bounded before a loop over ranks: the number comes from a file.
        if type(mapping.get(key, 1)) is not int or not 1 <= mapping.get(key, 1) <= MAX_RANKS:
            raise CheckpointError(f"{file}: mapping.{key} must be from 1 to {MAX_RANKS}, got {mapping[key]!r}")
    if mapping.get("pp_size", 1) != 1:
        raise UnsupportedError(f"{directory} is split over {mapping['pp_size']} pipeline stages; only 1 is read")
    return config


def open_ranks(directory: Path, config: Mapping[str, Any]) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each rank of a checkpoint by the names in its file, which must be the same in all."""
    tp = (config.get("mapping") or {}).get("tp_size", 1)
    files = [directory / f"rank{rank}.safetensors" for rank in range(tp)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{directory} has no {', '.join(missing[:4])}: its config.json says tp_size {tp}")
    # A stale config would silently drop the remaining ranks' parts.
    if (directory / f"rank{tp}.safetensors").exists():
        raise CheckpointError(f"{directory} has a rank{tp}.safetensors, but its config.json says tp_size {tp}")
    ranks = [stored_tensors(read_file_headers(file)) for file in files]
    for rank, tensors in enumerate(ranks):
        if odd := sorted(tensors.keys() ^ ranks[0].keys()):
            has, lacks = (0, rank) if odd[0] in ranks[0] else (rank, 0)
            raise CheckpointError(f"{files[lacks]} has no tensor {odd[0]}, which {files[has].name} has")
    return ranks


def to_drafter_config(config: Mapping[str, Any], recurrence: str | None, directory: Path) -> DrafterConfig:
    """Return this project's config of the drafter in a checkpoint, which holds it where this project wrote it.

    A `recurrence` of None is what the checkpoint holds, or else "apple", which public trainers train; TensorRT-LLM's
    engine computed another.
    """
    if missing := [key for key in _DRAFTER_KEYS.values() if key not in config]:
        raise CheckpointError(f"{directory / 'config.json'} does not say {', '.join(missing)}: it holds no drafter")
    values = dict(config.get(DRAFTER_CONFIG_KEY) or {"recurrence": "apple"})
    values.pop("greedy_search", None)
    values |= {name: config[key] for name, key in _DRAFTER_KEYS.items()}
    with config_errors(directory, "drafter"):
        return DrafterConfig(**values | ({} if recurrence is None else {"recurrence": recurrence}))


def to_defaults(config: Mapping[str, Any]) -> Defaults:
    """Return the search defaults of a checkpoint, and its greedy search.

    TensorRT-LLM's key for greedy search is always set; for a checkpoint that this project wrote, the value before the
    conversion is read, which may be None.
    """
    greedy = config.get("redrafter_greedy_search")
    if greedy is True and "greedy_search" in (config.get(DRAFTER_CONFIG_KEY) or {}):
        greedy = config[DRAFTER_CONFIG_KEY]["greedy_search"]
    shape = TreeShape(config.get("redrafter_num_beams"), config.get("redrafter_draft_len_per_beam"))
    return Defaults(shape, greedy)


def to_pair_config(
    config: DrafterConfig, names: Iterable[str], defaults: Defaults, base: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Return TensorRT-LLM's config of a base with its drafter, whose tensors have these names.

    A `greedy_search` of None becomes true, as in TensorRT-LLM's script.
    """
    architecture = base.get("base_model_architecture", base.get("architecture"))
    architecture = "LlamaForCausalLM" if architecture == _FIRST_PAIRS else architecture
    if architecture not in _ARCHITECTURES:
        message = f"{directory} is a {architecture}; TensorRT-LLM has ReDrafter for {', '.join(_ARCHITECTURES)} only"
        raise UnsupportedError(message)
    drafter = {key: x for key, x in config.to_diff_dict().items() if key not in ("model_type", *_LEFT_OUT)}
    pair = dict(base) | {
        "architecture": _ARCHITECTURES[architecture][1],
        "base_model_architecture": architecture,
        **{key: getattr(config, name) for name, key in _DRAFTER_KEYS.items()},
        "redrafter_num_beams": defaults.shape.num_beams,
        "redrafter_draft_len_per_beam": defaults.shape.draft_len_per_beam,
        "redrafter_greedy_search": defaults.greedy_search is not False,
        DRAFTER_CONFIG_KEY: drafter | {"greedy_search": defaults.greedy_search},
    }
    quantization = dict(pair.get("quantization") or {})
    # The drafter is not quantized, so TensorRT-LLM must leave its layers alone.
    if quantization.get("exclude_modules") is not None:
        paths = ((DRAFTER_PREFIX + name).split(".")[:-1] for name in names)
        modules = (module for path in paths for module in accumulate(path, "{}.{}".format))
        quantization["exclude_modules"] = [*dict.fromkeys([*quantization["exclude_modules"], *modules])]
        pair["quantization"] = quantization
    return pair


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
        **{theirs: getattr(config, ours) for ours, theirs in _BASE_KEYS.items()},
        "head_size": head_size,
        "position_embedding_type": "rope_gpt_neox",
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
        # TensorRT-LLM ignores unknown keys, so the whole config survives the way back.
        BASE_CONFIG_KEY: {key: x for key, x in config.to_dict().items() if key not in _LEFT_OUT},
    }


def to_hf_config(config: Mapping[str, Any], tensors: Tensors, directory: Path) -> PretrainedConfig:
    """Convert TensorRT-LLM's config of a base to Hugging Face's; a base without a head's tensor has tied ones."""
    with config_errors(directory, "base"):
        # Written by this project: nothing has to be derived.
        if values := config.get(BASE_CONFIG_KEY):
            hf_config: PretrainedConfig = AutoConfig.for_model(**values)
            hf_config.dtype = config["dtype"]
            return hf_config
        architecture = config.get("base_model_architecture", config["architecture"])
        known = {_FIRST_PAIRS: "llama"} | {name: model_type for name, (model_type, _) in _ARCHITECTURES.items()}
        if architecture not in known or config.get("qwen_type", "qwen2") != "qwen2":
            kind = config.get("qwen_type", architecture)
            raise UnsupportedError(f"{directory} holds a {kind}; of TensorRT-LLM's, only Llama and Qwen2 can be read")
        model_type = known[architecture]
        scaling, width, heads = dict(config.get("rotary_scaling") or {}), config.get("head_size"), "num_attention_heads"
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        rope = {"rope_type": kind, "rope_theta": config.get("rotary_base", 10000.0), **scaling}
        biases = {"attention_bias": config.get("attn_bias", False), "mlp_bias": config.get("mlp_bias", False)}
        given = {"num_key_value_heads": config[heads], **_BASE_DEFAULTS}
        given |= {key: value for key, value in config.items() if value is not None}
        return AutoConfig.for_model(
            model_type,
            **{ours: given[theirs] for ours, theirs in _BASE_KEYS.items()},
            bos_token_id=None,
            eos_token_id=None,
            rope_parameters=rope,
            tie_word_embeddings=LM_HEAD not in tensors,
            dtype=config["dtype"],
            architectures=[MODEL_TYPES[model_type]],
            **(biases if model_type == "llama" else {}),
            **({"head_dim": width} if width and width * config[heads] != config["hidden_size"] else {}),
        )


def check_base(config: PretrainedConfig, tensors: Tensors, tp: int, directory: Path) -> None:
    """Check that a base can be written as a TensorRT-LLM checkpoint for `tp` ranks."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedError(
            f"{directory} is a {config.model_type}; "
            f"a TensorRT-LLM checkpoint can be written for {', '.join(MODEL_TYPES)}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedError(f"{directory} has use_sliding_window, which TensorRT-LLM's Qwen2 does not")
    check_base_tensors(config, tensors, directory)
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    check_tp(tp, {"num_attention_heads": heads, "intermediate_size": config.intermediate_size})
    if key_heads % tp and tp % key_heads:
        raise ArgumentError(f"--tp-size {tp} neither divides num_key_value_heads={key_heads} nor is a multiple of it")


def check_base_tensors(config: PretrainedConfig, tensors: Tensors, directory: Path) -> None:
    """Raise `CheckpointError` unless a model has exactly the tensors that its config asks for."""
    read = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    tied = [LM_HEAD] if config.tie_word_embeddings else []
    check_tensors(lambda: AutoModelForCausalLM.from_config(config), read, directory, optional=tied)


def check_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Raise `ArgumentError` unless the number of ranks divides all sizes, given by their names in the config."""
    possible = [count for count in range(1, 65) if all(value % count == 0 for value in sizes.values())]
    for name, value in sizes.items():
        if value % tp:
            raise ArgumentError(f"--tp-size {tp} does not divide {name}={value}; take {', '.join(map(str, possible))}")


class Rule(NamedTuple):
    """Names the tensors of ours that one tensor of the ranks holds: one, or the query, key and value together."""

    theirs: str
    ours: tuple[str, ...]
    dim: int | None  # by which ranks split it; None where each has it whole
    heads: tuple[int, ...] = ()  # of query, key and value, by which these are split


def base_rules(layers: int, heads: int, key_heads: int, embedding_dim: int | None = None) -> Iterator[Rule]:
    """Yield the rules of a base; `embedding_dim` is the dimension by which its embedding table is split."""
    rows = [(theirs, ours, embedding_dim if f"{ours}.weight" == EMBEDDING else dim) for theirs, ours, dim in _TABLES]
    for i in range(layers):
        rows += [(f"transformer.layers.{i}.{theirs}", f"model.layers.{i}.{ours}", dim) for theirs, ours, dim in _LAYERS]
    for (theirs, ours, dim), kind in product(rows, ("weight", "bias")):
        name = f"{theirs}.{kind}"
        if ours.endswith("self_attn"):
            yield Rule(name, tuple(f"{ours}.{x}_proj.{kind}" for x in "qkv"), dim, (heads, key_heads, key_heads))
        else:
            # A layer that is split by columns has its whole bias on each rank.
            yield Rule(name, (f"{ours}.{kind}",), None if kind == "bias" and dim == 1 else dim)


def drafter_rules(names: Iterable[str]) -> Iterator[Rule]:
    """Yield the rules of a drafter with tensors of these names, which are ours."""
    return (Rule(DRAFTER_PREFIX + name, (name,), None if name == UNUSED_NORM else 0) for name in names)


def split(tensors: Tensors, rules: Iterable[Rule], rank: int, tp: int) -> dict[str, StoredTensor]:
    """Return one rank's part of tensors, by TensorRT-LLM's names."""
    part = {}
    for theirs, ours, dim, heads in rules:
        if ours[0] not in tensors:
            continue  # a bias that the model does not have, or a tied head
        whole = [tensors[name] for name in ours]
        if heads:
            shares = [_heads_of_rank(*each, rank, tp) for each in zip(whole, heads, strict=True)]
        elif dim is None:
            shares = whole
        else:
            share = -(-whole[0].shape[dim] // tp)
            padded = pad_rows(whole[0], share * tp) if dim == 0 else whole[0]
            shares = [_narrow(padded, dim, rank * share, share)]
        part[theirs] = concat(shares, 0)
    return part


def _heads_of_rank(tensor: StoredTensor, heads: int, rank: int, tp: int) -> StoredTensor:
    # With fewer key heads than ranks, neighbouring ranks get the same head.
    width = tensor.shape[0] // heads
    return _narrow(tensor, 0, rank * heads // tp * width, max(heads // tp, 1) * width)


def join(ranks: Sequence[Tensors], rules: Iterable[Rule], vocabulary: int) -> dict[str, StoredTensor]:
    """Return the tensors that `split` has split, without the padding of heads and tables to a multiple of the ranks."""
    joined: dict[str, StoredTensor] = {}
    tp = len(ranks)
    for theirs, ours, dim, heads in rules:
        if theirs not in ranks[0]:
            continue
        parts, start = [rank[theirs] for rank in ranks], 0
        if not heads:
            whole = parts[0] if dim is None else concat(parts, dim)
            padded = ours[0] in (LM_HEAD, EMBEDDING) and vocabulary < whole.shape[0] <= -(-vocabulary // tp) * tp
            joined[ours[0]] = _narrow(whole, 0, 0, vocabulary) if padded else whole
            continue
        counts = [max(count // tp, 1) for count in heads]
        width = parts[0].shape[0] // sum(counts)
        for name, count, every in zip(ours, counts, heads, strict=True):
            held = parts[:: max(tp // every, 1)]  # one rank for each key head
            joined[name] = concat([_narrow(x, 0, start * width, count * width) for x in held], 0)
            start += count
    return joined


def join_base(ranks: Sequence[Tensors], config: Mapping[str, Any], directory: Path) -> dict[str, StoredTensor]:
    """Return the base's tensors by Hugging Face's names, put together from all ranks."""
    heads, tp = config["num_attention_heads"], len(ranks)
    key_heads = config.get("num_key_value_heads") or heads
    if heads % tp or (key_heads % tp and tp % key_heads):
        raise CheckpointError(f"{directory} has {heads} heads and {key_heads} key heads, which {tp} ranks cannot share")
    sharding = config.get("embedding_sharding_dim", 0)
    if sharding not in (0, 1):
        raise CheckpointError(f"{directory}: embedding_sharding_dim is 0 or 1, not {sharding!r}")
    parallel = sharding if config.get("use_parallel_embedding") else None
    rules = list(base_rules(config["num_hidden_layers"], heads, key_heads, parallel))
    # A tensor that is not read would be lost silently.
    if unknown := sorted(ranks[0].keys() - {rule.theirs for rule in rules}):
        raise UnsupportedError(f"{directory} has {unknown[0]}, which is no tensor of a Llama or Qwen2")
    return join(ranks, rules, config["vocab_size"])


def _narrow(tensor: StoredTensor, dim: int, first: int, length: int) -> StoredTensor:
    return tensor.map(lambda x: x.narrow(dim, first, length))
