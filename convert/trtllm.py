"""TensorRT-LLM's ReDrafter checkpoints: `config.json` and a `rank{r}.safetensors` for each of `tp_size` ranks.

One file holds base and drafter. Every tensor of the drafter is split along its rows, biases too; the head is padded
with rows of zeros until it can be. The names are this project's behind `drafter.`. The backend that read them was
removed in 2026, so the format changes no more.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter.checkpoint import TreeShape
from redrafter.convert.tensors import Stored, joined, of_file, padded, rows
from redrafter.drafter import DrafterConfig
from redrafter.errors import ArgumentError, CheckpointError, UnsupportedError
from redrafter.headers import read_file

__all__ = [
    "ARCHITECTURES",
    "PREFIX",
    "check_drafter",
    "check_tp",
    "drafter_config",
    "drafter_part",
    "read_ranks",
    "rounded",
    "shape_of",
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
OWN = "redrafter_drafter_config"  # ours, whole, for the way back; TensorRT-LLM keeps keys that it does not know


def tp_of(config: Mapping[str, Any], place: Path) -> int:
    """How many ranks a checkpoint is for."""
    mapping = config.get("mapping") or {}
    tp, pp = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
    if not isinstance(tp, int) or tp < 1:
        raise CheckpointError(f"{place / 'config.json'}: mapping.tp_size must be a positive integer, got {tp!r}")
    if pp != 1:
        raise UnsupportedError(f"{place} is split over {pp} pipeline stages; only pp_size 1 can be read")
    return tp


def read_ranks(place: Path, tp: int) -> list[dict[str, Stored]]:
    """The tensors of each rank, as the files name them."""
    files = [place / f"rank{rank}.safetensors" for rank in range(tp)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{place} has no {', '.join(missing)}: its config.json says tp_size {tp}")
    return [
        {name: of_file(file, name, each.shape, each.dtype) for name, each in read_file(file).items()} for file in files
    ]


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
    own |= {mine: config[theirs] for mine, theirs in keys.items()}
    return DrafterConfig(**own | ({} if recurrence is None else {"recurrence": recurrence}))


def shape_of(config: Mapping[str, Any]) -> TreeShape:
    return TreeShape(config.get("redrafter_num_beams"), config.get("redrafter_draft_len_per_beam"))


def their_drafter_config(
    config: DrafterConfig, shape: TreeShape, greedy: bool, base: Mapping[str, Any], place: Path
) -> dict[str, Any]:
    """The config of a pair: its base's, with the drafter's part."""
    architecture = base.get("base_model_architecture", base.get("architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{place} is a {architecture}; TensorRT-LLM has ReDrafter for {', '.join(ARCHITECTURES)} only"
        )
    plain = config.to_diff_dict()
    own = {key: value for key, value in plain.items() if key not in ("model_type", "transformers_version")}
    found = dict(base) | {
        "architecture": ARCHITECTURES[str(architecture)],
        "base_model_architecture": architecture,
        "redrafter_num_layers": config.num_draft_layers,
        "redrafter_hidden_size": config.hidden_size,
        "redrafter_exit_dim": config.exit_dim,
        "redrafter_is_rnn": config.rnn,
        "redrafter_num_beams": shape.num_beams,
        "redrafter_draft_len_per_beam": shape.draft_len_per_beam,
        "redrafter_greedy_search": greedy,
        OWN: own,
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
    lacking = {
        "recurrence": config.rnn and config.recurrence not in ("apple", "trtllm"),
        "target_layers": bool(config.target_layers),
        "head_rank": config.head_rank is not None,
        "draft_vocab_size": config.draft_vocab_size is not None,
    }
    for name, lacks in lacking.items():
        if lacks:
            raise UnsupportedError(f"TensorRT-LLM's format cannot hold {name}={getattr(config, name)!r}")


def check_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Raise `ArgumentError` when there cannot be so many ranks. sizes: what is split, by name."""
    possible = [count for count in range(1, 65) if all(value % count == 0 for value in sizes.values())]
    for name, value in sizes.items():
        if tp < 1 or value % tp:
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
        if lacking := next((rank for rank, each in enumerate(ranks) if name not in each), None):
            raise CheckpointError(f"rank{lacking}.safetensors has no tensor {name}, which rank0.safetensors has")
        own = name.removeprefix(PREFIX)
        whole = ranks[0][name] if own == "emb_norm.weight" else joined([each[name] for each in ranks])
        if own == "lm_head.weight" and vocabulary < whole.length <= rounded(vocabulary, len(ranks)):
            whole = rows(whole, 0, vocabulary)
        found[own] = whole
    return found
