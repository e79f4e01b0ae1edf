"""The conditions of a measurement (pair, hardware, versions, prompts), as every report states them first."""

import platform
import shlex
import sys
from typing import Any

import torch
import transformers

from redrafter.cache.dense import stored_as
from redrafter.engine.kv_cache_dtype import kv_dtype_of
from redrafter.engine.recurrent import ReDrafter
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.floors import draft_bytes, forward_bytes, slot_bytes
from redrafter.measure.workload import Workload
from redrafter.version import __version__

__all__ = ["facts", "hardware", "head", "versions"]


def facts(work: Workload, names: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the conditions of a benchmark, as its JSON document begins.

    Args:
        work: The workload to be measured.
        names: `model`, `drafter` and `prompts` by name, and under `padded` the sentence on a padded model, or None.
        options: Every option of the command, as typed or its default.
    """
    engine, target = work.engine, work.engine.target
    lengths = [len(prompt) for prompt in work.prompts]
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        **names,
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
        "seed": work.seed,
        "temperature": work.temperature,
        "max_new_tokens": work.max_new_tokens,
        "prompt_tokens": {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)},
        "processes": target.ranks.size,
        "captured_steps": target.varlen.ok,
        "why_not_captured": target.varlen.reason,
        "tuned": engine.tuning is not None,
        "bytes": _bytes(engine),
        "prefix_reuse": "none: every run reads its prompts from the first token on",
        "options": options,
    }


def _bytes(engine: ReDrafter) -> dict[str, int]:
    """Return the bytes that a step reads: weights by forward and by draft, keys and values by token."""
    stored = stored_as(engine.target.shapes, kv_dtype_of(engine.options.kv_cache_dtype))
    return {
        "weights_per_forward": forward_bytes(engine.model),
        "drafter_weights_per_step": draft_bytes(engine.drafter, engine.proposer.depth),
        "keys_and_values_per_token": slot_bytes(stored),
    }


def versions() -> dict[str, str | None]:
    """Return the version of everything that a number may depend on; None under `cuda` without CUDA."""
    return {
        "redrafter": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def hardware(device: torch.device) -> str:
    """Describe a device, e.g. `NVIDIA H200, 140 GiB` or `x86_64 CPU, 2 threads`."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def head(document: dict[str, Any]) -> list[str]:
    """Return the lines of text that state what `facts` returned, for the top of a printed report."""
    used = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    prompts, size = document["prompt_tokens"], document["bytes"]
    padded = [document["padded"]] if document["padded"] else []
    return [
        document["command"],
        *padded,
        f"{document['model']}, drafter {document['drafter']}, {document['dtype']}",
        f"{document['hardware']}; {used}",
        f"{prompts['prompts']} prompts of {prompts['shortest']} to {prompts['longest']} tokens from "
        f"{document['prompts']}; {document['max_new_tokens']} new tokens, end of text ignored; "
        f"temperature {document['temperature']:g}, seed {document['seed']}",
        f"read per forward: {size['weights_per_forward'] / 1e9:.3f} GB of weights, "
        f"{size['keys_and_values_per_token'] / 1e3:.1f} kB a token of keys and values; "
        f"per step by the drafter: {size['drafter_weights_per_step'] / 1e9:.3f} GB",
        "steps are captured CUDA graphs"
        if document["captured_steps"]
        else f"steps are not captured: {document['why_not_captured']}",
    ]
