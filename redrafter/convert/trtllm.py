"""TensorRT-LLM's ReDrafter checkpoints: `config.json` and a `rank{r}.safetensors` for each of `tp_size` ranks.

A rank's file holds its part of the base and of the drafter. Every tensor of the drafter is split along its rows, biases
too; the head is padded with rows of zeros to a multiple of `tp_size`. Names are this project's after `drafter.`. The
backend that read these checkpoints was removed in 2026, so the format does not change any more.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert.apple import UNUSED_NORM
from redrafter.convert.tensors import LazyTensor, concat_rows, open_file, pad_rows, slice_rows
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import read_json

DRAFTER_PREFIX = "drafter."
# Architecture of the pair by architecture of the base.
ARCHITECTURES = {
    "LlamaForCausalLM": "ReDrafterForLLaMALM",
    "QWenForCausalLM": "ReDrafterForQWenLM",
    "Qwen2ForCausalLM": "ReDrafterForQWenLM",
}
MAX_RANKS = 4096
_CONFIG_KEYS: tuple[tuple[str, type, bool], ...] = (  # name, type, whether it is required
    ("architecture", str, True),
    ("base_model_architecture", str, False),
    ("dtype", str, True),
    ("vocab_size", int, True),
    ("hidden_size", int, True),
    ("num_hidden_layers", int, True),
    ("num_attention_heads", int, True),
    ("num_key_value_heads", int, False),
    ("intermediate_size", int, False),
    ("head_size", int, False),
    ("mapping", dict, False),
    ("quantization", dict, False),
    ("rotary_scaling", dict, False),
    ("redrafter_num_beams", int, False),
    ("redrafter_draft_len_per_beam", int, False),
    ("redrafter_greedy_search", bool, False),
    ("redrafter_drafter_config", dict, False),
    ("redrafter_base_config", dict, False),
)
# This project's config of the drafter, for the way back; TensorRT-LLM ignores keys that it does not know.
DRAFTER_CONFIG_KEY = "redrafter_drafter_config"


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint, and check the types of the keys that are used here."""
    config = read_json(directory / "config.json")
    for key, kind, needed in _CONFIG_KEYS:
        value = config.get(key)
        fits = type(value) is kind and (not isinstance(value, int) or 0 < value < 2**31 or kind is bool)
        if (value is not None or needed) and not fits:
            kinds = {int: "a positive integer", str: "a string", dict: "an object", bool: "true or false"}
            raise CheckpointError(f"{directory / 'config.json'}: {key} must be {kinds[kind]}, got {value!r}")
    mapping = config.get("mapping") or {}
    for key in ("tp_size", "pp_size"):
        if type(mapping.get(key, 1)) is not int or not 1 <= mapping.get(key, 1) <= MAX_RANKS:
            raise CheckpointError(
                f"{directory / 'config.json'}: mapping.{key} must be from 1 to {MAX_RANKS}, got {mapping[key]!r}"
            )
    if mapping.get("pp_size", 1) != 1:
        raise UnsupportedError(
            f"{directory} is split over {mapping['pp_size']} pipeline stages; only pp_size 1 can be read"
        )
    return config


def tensor_parallel_size(config: Mapping[str, Any]) -> int:
    """Return the number of ranks of a checkpoint."""
    ranks: int = (config.get("mapping") or {}).get("tp_size", 1)
    return ranks


def open_ranks(directory: Path, tp: int) -> list[dict[str, LazyTensor]]:
    """Return the tensors of each of `tp` ranks by the names in its file, which must be the same in all."""
    files = [directory / f"rank{rank}.safetensors" for rank in range(tp)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{directory} has no {', '.join(missing[:4])}: its config.json says tp_size {tp}")
    if (directory / f"rank{tp}.safetensors").exists():
        raise CheckpointError(f"{directory} has a rank{tp}.safetensors, but its config.json says tp_size {tp}")
    ranks = [open_file(file) for file in files]
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
    keys = {
        "vocab_size": "vocab_size",
        "hidden_size": "redrafter_hidden_size",
        "exit_dim": "redrafter_exit_dim",
        "num_draft_layers": "redrafter_num_layers",
        "rnn": "redrafter_is_rnn",
    }
    if missing := [key for key in keys.values() if key not in config]:
        raise CheckpointError(f"{directory / 'config.json'} does not say {', '.join(missing)}: it holds no drafter")
    values = dict(config.get(DRAFTER_CONFIG_KEY) or {"recurrence": "apple"})
    values.pop("greedy_search", None)
    values |= {name: config[key] for name, key in keys.items()}
    try:
        return DrafterConfig(**values | ({} if recurrence is None else {"recurrence": recurrence}))
    except Exception as error:  # transformers checks some of it, with errors of its own
        raise CheckpointError(f"{directory / 'config.json'} describes no drafter: {first_line(error)}") from error


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
    config: DrafterConfig, defaults: Defaults, base: Mapping[str, Any], directory: Path
) -> dict[str, Any]:
    """Return TensorRT-LLM's config of a base with its drafter.

    A `greedy_search` of None becomes true, as in TensorRT-LLM's script.
    """
    architecture = base.get("base_model_architecture", base.get("architecture"))
    if architecture == "ReDrafterForCausalLM":  # written by TensorRT-LLM's first converter, for Llama only
        architecture = "LlamaForCausalLM"
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{directory} is a {architecture}; TensorRT-LLM has ReDrafter for {', '.join(ARCHITECTURES)} only"
        )
    left_out = ("model_type", "transformers_version", "_name_or_path")
    drafter = {key: value for key, value in config.to_diff_dict().items() if key not in left_out}
    pair = dict(base) | {
        "architecture": ARCHITECTURES[str(architecture)],
        "base_model_architecture": architecture,
        "redrafter_num_layers": config.num_draft_layers,
        "redrafter_hidden_size": config.hidden_size,
        "redrafter_exit_dim": config.exit_dim,
        "redrafter_is_rnn": config.rnn,
        "redrafter_num_beams": defaults.shape.num_beams,
        "redrafter_draft_len_per_beam": defaults.shape.draft_len_per_beam,
        "redrafter_greedy_search": defaults.greedy_search is not False,
        DRAFTER_CONFIG_KEY: drafter | {"greedy_search": defaults.greedy_search},
    }
    quantization = dict(pair.get("quantization") or {})
    if quantization.get("exclude_modules") is not None:
        modules = ["drafter", "drafter.layers", "drafter.lm_head"]
        modules += ["drafter.rnn_u", "drafter.rnn_w"] if config.rnn else []
        modules += ["drafter.input_proj"] if config.exit_dim != 2 * config.hidden_size else []
        for layer in range(config.num_draft_layers):
            modules += [f"drafter.layers.{layer}", f"drafter.layers.{layer}.linear"]
        quantization["exclude_modules"] = [*dict.fromkeys([*quantization["exclude_modules"], *modules])]
        pair["quantization"] = quantization
    return pair


def check_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Raise `ArgumentError` unless the number of ranks divides all sizes, given by their names in the config."""
    possible = [count for count in range(1, 65) if all(value % count == 0 for value in sizes.values())]
    for name, value in sizes.items():
        if value % tp:
            raise ArgumentError(
                f"--tp-size {tp} does not divide {name}={value}; possible are {', '.join(map(str, possible))}"
            )


def round_up(length: int, tp: int) -> int:
    """Return the smallest multiple of the number of ranks that is at least `length`."""
    return -(-length // tp) * tp


def split_drafter(
    tensors: Mapping[str, LazyTensor], config: DrafterConfig, rank: int, tp: int
) -> dict[str, LazyTensor]:
    """Return one rank's part of a drafter, by TensorRT-LLM's names."""
    part = {}
    for name, tensor in tensors.items():
        if name == UNUSED_NORM:
            part[DRAFTER_PREFIX + name] = tensor
            continue
        if name == "lm_head.weight":
            tensor = pad_rows(tensor, round_up(config.vocab_size, tp))
        share = tensor.length // tp
        part[DRAFTER_PREFIX + name] = slice_rows(tensor, rank * share, (rank + 1) * share)
    return part


def join_drafter(ranks: Sequence[Mapping[str, LazyTensor]], vocabulary: int) -> dict[str, LazyTensor]:
    """Return the drafter's tensors by this project's names, put together from all ranks.

    `vocabulary` is the number of the head's rows without padding.
    """
    drafter = {}
    for name in ranks[0]:
        if not name.startswith(DRAFTER_PREFIX):
            continue
        new_name = name.removeprefix(DRAFTER_PREFIX)
        whole = ranks[0][name] if new_name == UNUSED_NORM else concat_rows([rank[name] for rank in ranks])
        if new_name == "lm_head.weight" and vocabulary < whole.length <= round_up(vocabulary, len(ranks)):
            whole = slice_rows(whole, 0, vocabulary)
        drafter[new_name] = whole
    return drafter
