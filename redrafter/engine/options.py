"""Options of an engine, each said once: as an argument of `from_pretrained`, a flag and a key of config files."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from redrafter.errors import ArgumentError
from redrafter.options import option

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., Any])

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class EngineOptions:
    """Limits and modes that an engine keeps to in every request. `from_pretrained` takes each of them by name."""

    kv_cache_free_gpu_memory_fraction: float = option(
        0.9,
        "share of the GPU memory left by the model, at the first request, that the KV cache may take; it takes no more "
        "than 64 rows of the longest text need",
    )
    max_input_len: int | None = option(None, "most tokens of a prompt (default: the model's context)")
    max_seq_len: int | None = option(None, "most tokens of a text, prompt included (default: the model's context)")
    max_batch_size: int = option(
        256, "most texts that `generate` decodes side by side; more prompts wait for their turn", commands=()
    )
    compile: bool = option(
        True, "compile the model on a GPU, which takes time at the first request and makes steps faster"
    )
    draft_from_text: bool = option(
        True, "add to a drafter's drafts what the text itself says where it repeats: what followed the last time"
    )
    batch_invariant: bool = option(
        False,
        "write the same text whatever is computed beside it, bit for bit: drafts, other texts, cut prompts; slower, "
        "and on a GPU only for a compiled model",
    )
    max_loras: int = option(4, "LoRA adapters that may be loaded at once", commands=("serve",))
    max_lora_rank: int = option(
        16,
        "most of their ranks; a step with adapters computes as many columns for each, in each layer that they change",
        commands=("serve",),
    )
    kv_host_cache_gib: float = option(
        0.0,
        "GiB of the host's memory for keys and values that have to leave the GPU, where prompts still find them; taken "
        "with the first request, or when a server starts",
        commands=("serve",),
    )
    max_prefix_states: int = option(
        64,
        "most stored beginnings of texts whose recurrent states are kept, of a model with such layers (LFM2, Mamba-2, "
        "Qwen3-Next and others): prompts continue there; as much memory each as a text's states, a quarter of the "
        "cache's at most; 0: every prompt is read from its first token on",
    )
    kv_cache_dtype: str = option(
        "auto",
        "format of stored keys and values: auto is the activations', fp8 (fp8_e4m3) holds twice as many tokens",
        choices=KV_CACHE_DTYPES,
    )

    def __post_init__(self) -> None:
        for item in fields(EngineOptions):
            name, value, default = item.name, getattr(self, item.name), item.default
            number = isinstance(value, int | float) and not isinstance(value, bool)
            whole = number and isinstance(value, int)
            if isinstance(default, bool):
                fits, what = isinstance(value, bool), "True or False"
            elif default is None:
                fits = value is None or (whole and 2 <= value < 1 << 31)
                what = "an integer of 2 or more, and below 2**31"
            elif name == "max_prefix_states":
                fits, what = whole and 0 <= value < 1 << 31, "an integer of 0 or more"
            elif isinstance(default, int):
                fits, what = whole and 1 <= value < 1 << 31, "a positive integer"
            elif choices := item.metadata.get("choices"):
                fits, what = value in choices, f"one of {', '.join(choices)}"
            elif name == "kv_host_cache_gib":
                import psutil

                total = psutil.virtual_memory().total / 2**30
                fits, what = number and 0 <= value <= total, f"from 0 to the machine's memory, {int(total)} GiB"
                name = "kv_host_cache_gib (--kv-host-cache-gib)"
            else:
                fits, what = number and 0 < value <= 1, "above 0 and at most 1"
            if not fits:
                raise ArgumentError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True)
class LoadArguments:
    """How a target is loaded: each field is an argument of every `from_pretrained`; that of `ReDrafter` explains it."""

    dtype: Union[str, "torch.dtype"] = "auto"
    device: Union[str, "torch.device", None] = None
    tp_size: int = 1
    trust_remote_code: bool = False
    quantization: str | None = None
    adapters: Mapping[str, str | Path] | None = None


def takes_options(function: Function) -> Function:
    """Show the fields of both dataclasses in the signature of a `from_pretrained` that takes them as keywords."""
    signature = inspect.signature(function)
    *first, rest = signature.parameters.values()
    ours = [item for kind in (LoadArguments, EngineOptions) for item in inspect.signature(kind).parameters.values()]
    shown = [*first, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in ours)]
    shown.append(rest.replace(name="model_kwargs"))  # what is left for transformers
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def split_keywords(
    caller: Callable[..., Any], keywords: Mapping[str, Any]
) -> tuple[EngineOptions, dict[str, Any], Mapping[str, str | Path] | None]:
    """Split the keyword arguments of a `from_pretrained`, the `caller`.

    Returns:
        The engine's options, the arguments of `bind` for the target, and the adapters to load.
    """
    names = {item.name for item in fields(EngineOptions)}
    options = EngineOptions(**{name: value for name, value in keywords.items() if name in names})
    load = vars(LoadArguments()) | {name: value for name, value in keywords.items() if name not in names}
    adapters = load.pop("adapters")
    return options, load | {"caller": caller}, adapters
