"""Options of an engine, each declared once: as an argument of `from_pretrained`, a flag and a key of config files."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

from redrafter.cache.options import CacheOptions
from redrafter.errors import ArgumentError
from redrafter.model.options import ModelOptions
from redrafter.options import option, whole

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class EngineOptions(ModelOptions, CacheOptions):
    """Limits and modes of an engine in every request. `from_pretrained` takes each of them by name.

    Attributes:
        max_input_len: most tokens of a prompt (default: the model's context)
        max_seq_len: most tokens of a sequence, prompt included (default: the model's context)
        max_batch_size: most sequences that `generate` decodes at once; more prompts wait for their turn
        draft_from_text: add drafts copied from the text where it repeats itself, in addition to the drafter's drafts
    """

    max_input_len: int | None = option(None, check=whole(2, optional=True))
    max_seq_len: int | None = option(None, check=whole(2, optional=True))
    max_batch_size: int = option(256, check=whole(1), commands=())
    draft_from_text: bool = True

    def check_lengths(self, context: int | None) -> None:
        """Raise `ArgumentError` for lengths above the model's context, which would be cut to it."""
        for name, length in (("max_input_len", self.max_input_len), ("max_seq_len", self.max_seq_len)):
            if length is not None and context is not None and length > context:
                raise ArgumentError(f"{name} is {length}, and the model's context is {context}: give {context} at most")


@dataclass(frozen=True)
class LoadArguments:
    """Options to load a target. Each field is an argument of every `from_pretrained`, documented at `ReDrafter`."""

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
    shown.append(rest.replace(name="model_kwargs"))  # the remaining arguments, passed to transformers
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def split_keywords(
    caller: Callable[..., object], keywords: Mapping[str, Any]
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
