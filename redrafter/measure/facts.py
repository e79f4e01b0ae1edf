"""The conditions of a measurement (pair, hardware, versions, prompts), as every report states them first."""

import platform
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from redrafter.cache.dense import stored_as
from redrafter.engine.modes import kv_dtype_of
from redrafter.files.dtype_names import dtype_name
from redrafter.measure.floors import draft_bytes, forward_bytes, slot_bytes
from redrafter.measure.run import Workload
from redrafter.target.target import Target
from redrafter.version import __version__

__all__ = ["conditions", "describe_pair", "facts", "hardware", "head", "versions"]


def conditions(target: Target) -> dict[str, Any]:
    """Return the command, the hardware, the dtype and the versions, which all documents of measurements state."""
    return {
        "command": shlex.join(["redrafter", *sys.argv[1:]]),
        "hardware": hardware(target.device),
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "versions": versions(),
    }


def facts(work: Workload, names: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the conditions of a benchmark, as its JSON document begins.

    Args:
        work: The workload to be measured.
        names: `model`, `drafter` and `prompts` by name, and under `padded` the sentence on a padded model, or None.
        options: Every option of the command, as typed or its default.
    """
    engine, target = work.engine, work.engine.target
    lengths = [len(prompt) for prompt in work.prompts]
    stored = stored_as(target.shapes, kv_dtype_of(engine.options.kv_cache_dtype))
    return {
        **conditions(target),
        **names,
        "seed": work.seed,
        "temperature": work.temperature,
        "max_new_tokens": work.max_new_tokens,
        "prompt_tokens": {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)},
        "processes": target.ranks.size,
        "captured_steps": target.varlen.ok,
        "why_not_captured": target.varlen.reason,
        "tuned": engine.tuning is not None,
        "bytes": {  # that a step reads: weights by forward and by draft, keys and values by token
            "weights_per_forward": forward_bytes(engine.model),
            "drafter_weights_per_step": draft_bytes(engine.drafter, engine.proposer.depth),
            "keys_and_values_per_token": slot_bytes(stored),
        },
        "prefix_reuse": "none: every run reads its prompts from the first token on",
        "options": options,
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


def describe_pair(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines that state the command, the pair, the hardware and the versions of a document."""
    used = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    drafter = f", drafter {document['drafter']}" if "drafter" in document else ""
    yield document["command"]
    if document.get("padded"):
        yield document["padded"]
    yield f"{document['model']}{drafter}, {document['dtype']}"
    yield f"{document['hardware']}; {used}"


def head(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of text that state what `facts` returned, for the top of a printed report."""
    prompts, size = document["prompt_tokens"], document["bytes"]
    yield from describe_pair(document)
    yield (
        f"{prompts['prompts']} prompts of {prompts['shortest']} to {prompts['longest']} tokens from "
        f"{document['prompts']}; {document['max_new_tokens']} new tokens, end of text ignored; "
        f"temperature {document['temperature']:g}, seed {document['seed']}"
    )
    yield (
        f"read per forward: {size['weights_per_forward'] / 1e9:.3f} GB of weights, "
        f"{size['keys_and_values_per_token'] / 1e3:.1f} kB a token of keys and values; "
        f"per step by the drafter: {size['drafter_weights_per_step'] / 1e9:.3f} GB"
    )
    why_not = document["why_not_captured"]
    yield "steps are captured CUDA graphs" if document["captured_steps"] else f"steps are not captured: {why_not}"
