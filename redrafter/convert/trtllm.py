"""TensorRT-LLM's ReDrafter checkpoints: `config.json` and a `rank{r}.safetensors` for each of `tp_size` ranks.

One file holds base and drafter. Every tensor of the drafter is split along its rows, biases too; the head is padded
with rows of zeros until it can be. The names are this project's behind `drafter.`. The backend that read them was
removed in 2026, so the format changes no more.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.checkpoints.headers import read_file_headers
from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert.apple import check_form
from redrafter.convert.tensors import Stored, joined, of_file, padded, rows
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError, first_line
from redrafter.files.checkpoint_kind import read_json

__all__ = [
    "ARCHITECTURES",
    "PREFIX",
    "check_drafter",
    "check_tp",
    "defaults_of",
    "drafter_config",
    "drafter_part",
    "read_config",
    "read_ranks",
    "rounded",
    "their_drafter_config",
    "tp_of",
    "whole_drafter",
]

PREFIX = "drafter."
# The base's architecture, and that of the pair.
ARCHITECTURES = {
    "LlamaForCausalLM": "ReDrafterForLLaMALM",
    "QWenForCausalLM": "ReDrafterForQWenLM",
    "Qwen2ForCausalLM": "ReDrafterForQWenLM",
}
MOST_RANKS = 4096
_KEYS: tuple[tuple[str, type, bool], ...] = (  # name, type, whether it must be there
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
OWN = "redrafter_drafter_config"  # ours, whole, for the way back; TensorRT-LLM keeps keys that it does not know


def read_config(place: Path) -> dict[str, Any]:
    """Its config.json, with the keys that are used here of the types they must be. Raises `CheckpointError` naming the
    key."""
    said = read_json(place / "config.json")
    for key, kind, needed in _KEYS:
        value = said.get(key)
        fits = type(value) is kind and (not isinstance(value, int) or 0 < value < 2**31 or kind is bool)
        if (value is not None or needed) and not fits:
            kinds = {int: "a positive integer", str: "a string", dict: "an object", bool: "true or false"}
            raise CheckpointError(f"{place / 'config.json'}: {key} must be {kinds[kind]}, got {value!r}")
    mapping = said.get("mapping") or {}
    for key in ("tp_size", "pp_size"):
        if type(mapping.get(key, 1)) is not int or not 1 <= mapping.get(key, 1) <= MOST_RANKS:
            raise CheckpointError(
                f"{place / 'config.json'}: mapping.{key} must be from 1 to {MOST_RANKS}, got {mapping[key]!r}"
            )
    if mapping.get("pp_size", 1) != 1:
        raise UnsupportedError(
            f"{place} is split over {mapping['pp_size']} pipeline stages; only pp_size 1 can be read"
        )
    return said


def tp_of(config: Mapping[str, Any]) -> int:
    """How many ranks a checkpoint is for."""
    found: int = (config.get("mapping") or {}).get("tp_size", 1)
    return found


def read_ranks(place: Path, tp: int) -> list[dict[str, Stored]]:
    """The tensors of each rank, as the files name them."""
    files = [place / f"rank{rank}.safetensors" for rank in range(tp)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{place} has no {', '.join(missing[:4])}: its config.json says tp_size {tp}")
    if (place / f"rank{tp}.safetensors").exists():
        raise CheckpointError(f"{place} has a rank{tp}.safetensors, but its config.json says tp_size {tp}")
    ranks = [
        {name: of_file(file, name, each.shape, each.dtype) for name, each in read_file_headers(file).items()}
        for file in files
    ]
    for rank, tensors in enumerate(ranks):
        if odd := sorted(tensors.keys() ^ ranks[0].keys()):
            has, lacks = (0, rank) if odd[0] in ranks[0] else (rank, 0)
            raise CheckpointError(f"{files[lacks]} has no tensor {odd[0]}, which {files[has].name} has")
    return ranks


def drafter_config(config: Mapping[str, Any], recurrence: str | None, place: Path) -> DrafterConfig:
    """What its drafter is. Of a checkpoint that this project wrote, what it was before; of another, the recurrence that
    public trainers train, which TensorRT-LLM's engine did not compute, unless told otherwise."""
    keys = {
        "vocab_size": "vocab_size",
        "hidden_size": "redrafter_hidden_size",
        "exit_dim": "redrafter_exit_dim",
        "num_draft_layers": "redrafter_num_layers",
        "rnn": "redrafter_is_rnn",
    }
    if missing := [key for key in keys.values() if key not in config]:
        raise CheckpointError(f"{place / 'config.json'} does not say {', '.join(missing)}: it holds no drafter")
    own = dict(config.get(OWN) or {"recurrence": "apple"})
    own.pop("greedy_search", None)
    own |= {mine: config[theirs] for mine, theirs in keys.items()}
    try:
        return DrafterConfig(**own | ({} if recurrence is None else {"recurrence": recurrence}))
    except Exception as error:  # transformers checks some of it, with errors of its own
        raise CheckpointError(f"{place / 'config.json'} describes no drafter: {first_line(error)}") from error


def defaults_of(config: Mapping[str, Any]) -> Defaults:
    """What it says of the search. Where this project wrote that nothing was said of greedy search, nothing is."""
    greedy = config.get("redrafter_greedy_search")
    if greedy is True and "greedy_search" in (config.get(OWN) or {}):
        greedy = config[OWN]["greedy_search"]
    shape = TreeShape(config.get("redrafter_num_beams"), config.get("redrafter_draft_len_per_beam"))
    return Defaults(shape, greedy)


def their_drafter_config(
    config: DrafterConfig, defaults: Defaults, base: Mapping[str, Any], place: Path
) -> dict[str, Any]:
    """The config of a pair: its base's, with the drafter's part. Greedy where nothing is said, as in their script."""
    architecture = base.get("base_model_architecture", base.get("architecture"))
    if architecture == "ReDrafterForCausalLM":  # what their first converter wrote, for Llama alone
        architecture = "LlamaForCausalLM"
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{place} is a {architecture}; TensorRT-LLM has ReDrafter for {', '.join(ARCHITECTURES)} only"
        )
    plain = config.to_diff_dict()
    own = {
        key: value for key, value in plain.items() if key not in ("model_type", "transformers_version", "_name_or_path")
    }
    found = dict(base) | {
        "architecture": ARCHITECTURES[str(architecture)],
        "base_model_architecture": architecture,
        "redrafter_num_layers": config.num_draft_layers,
        "redrafter_hidden_size": config.hidden_size,
        "redrafter_exit_dim": config.exit_dim,
        "redrafter_is_rnn": config.rnn,
        "redrafter_num_beams": defaults.shape.num_beams,
        "redrafter_draft_len_per_beam": defaults.shape.draft_len_per_beam,
        "redrafter_greedy_search": defaults.greedy_search is not False,
        OWN: own | {"greedy_search": defaults.greedy_search},
    }
    quantization = dict(found.get("quantization") or {})
    if quantization.get("exclude_modules") is not None:
        modules = ["drafter", "drafter.layers", "drafter.lm_head"]
        modules += ["drafter.rnn_u", "drafter.rnn_w"] if config.rnn else []
        modules += ["drafter.input_proj"] if config.exit_dim != 2 * config.hidden_size else []
        for layer in range(config.num_draft_layers):
            modules += [f"drafter.layers.{layer}", f"drafter.layers.{layer}.linear"]
        quantization["exclude_modules"] = [*dict.fromkeys([*quantization["exclude_modules"], *modules])]
        found["quantization"] = quantization
    return found


def check_drafter(config: DrafterConfig) -> None:
    """Raise `UnsupportedError` naming what their format has no place for."""
    check_form(config, "TensorRT-LLM's format", ("apple", "trtllm"))


def check_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Raise `ArgumentError` when there cannot be so many ranks. sizes: what is split, by name."""
    possible = [count for count in range(1, 65) if all(value % count == 0 for value in sizes.values())]
    for name, value in sizes.items():
        if value % tp:
            raise ArgumentError(
                f"--tp-size {tp} does not divide {name}={value}; possible are {', '.join(map(str, possible))}"
            )


def rounded(length: int, tp: int) -> int:
    """The next length that so many ranks share evenly."""
    return -(-length // tp) * tp


def drafter_part(tensors: Mapping[str, Stored], config: DrafterConfig, rank: int, tp: int) -> dict[str, Stored]:
    """What one rank holds of a drafter."""
    found = {}
    for name, tensor in tensors.items():
        if name == "emb_norm.weight":  # which nobody reads: kept for the way back
            found[PREFIX + name] = tensor
            continue
        if name == "lm_head.weight":
            tensor = padded(tensor, rounded(config.vocab_size, tp))
        share = tensor.length // tp
        found[PREFIX + name] = rows(tensor, rank * share, (rank + 1) * share)
    return found


def whole_drafter(ranks: Sequence[Mapping[str, Stored]], vocabulary: int) -> dict[str, Stored]:
    """The drafter's tensors by our names, put together."""
    found = {}
    for name in ranks[0]:
        if not name.startswith(PREFIX):
            continue
        own = name.removeprefix(PREFIX)
        whole = ranks[0][name] if own == "emb_norm.weight" else joined([each[name] for each in ranks])
        if own == "lm_head.weight" and vocabulary < whole.length <= rounded(vocabulary, len(ranks)):
            whole = rows(whole, 0, vocabulary)
        found[own] = whole
    return found
