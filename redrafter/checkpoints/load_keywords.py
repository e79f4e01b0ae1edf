"""Errors for keyword arguments of `from_pretrained` that nothing takes, with what may have been meant."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from redrafter.errors import ArgumentError, did_you_mean

__all__ = ["check_no_load_keywords", "check_reserved_keywords", "unknown_keyword_error"]

# Names that other libraries have for arguments of this one, and what to type here. Of several suggestions, the first
# that the caller has an argument for is made.
_FOREIGN_NAMES = {
    "acceptance_threshold": ("acceptance",),
    "assistant_model": ("draft_model",),
    "assistant_tokenizer": ("draft_tokenizer",),
    "draft_len": ("draft_len_per_beam",),
    "draft_len_per_beam": ("draft_len",),
    "kv_cache_free_gpu_mem_fraction": ("kv_cache_free_gpu_memory_fraction",),
    "max_draft_len": ("draft_len", "draft_len_per_beam"),
    "max_matching_ngram_size": ("ngram",),
    "num_draft_tokens": ("draft_len", "draft_len_per_beam"),
    "prompt_lookup_num_tokens": ("draft_len",),
    "redrafter_draft_len_per_beam": ("draft_len_per_beam",),
    "redrafter_num_beams": ("num_beams",),
    "speculative_model": ("draft_model",),
    "use_draft_logits": ('acceptance="rejection"',),
    "use_logits": ('acceptance="rejection"',),
}


def unknown_keyword_error(
    error: Exception, keywords: Mapping[str, Any], caller: Callable[..., Any] | None
) -> ArgumentError | None:
    """Return an error for a keyword argument that neither transformers nor the model's class takes.

    Args:
        error: What `from_pretrained` of transformers raised.
        keywords: The keyword arguments that were handed to it.
        caller: The `from_pretrained` of this library that took them; its arguments are suggested.

    Returns:
        The error, or None where `error` has another cause.
    """
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    if match is None or match[1] not in keywords:
        return None
    name, arguments = match[1], _argument_names(caller)
    translations = [text for text in _FOREIGN_NAMES.get(name, ()) if text.partition("=")[0] in arguments]
    hint = f"; did you mean {translations[0]}?" if translations else did_you_mean(name, arguments)
    return ArgumentError(f"from_pretrained() has no argument {name!r}, here or in transformers{hint}")


def check_reserved_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of transformers that this library sets itself or has another name for.

    Raises:
        ArgumentError: If `torch_dtype`, `output_loading_info` or `drafter_tp_size` is given.
    """
    if "torch_dtype" in keywords:
        raise ArgumentError(f"from_pretrained() takes dtype={keywords['torch_dtype']!r} for torch_dtype")
    if "output_loading_info" in keywords:
        raise ArgumentError("from_pretrained() returns an engine alone: leave out output_loading_info")
    if "drafter_tp_size" in keywords:
        raise ArgumentError("what drafts is whole in every process that shares the target: leave out drafter_tp_size")


def check_no_load_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuse keyword arguments for loading when the model is loaded already.

    Raises:
        ArgumentError: If there are any.
    """
    if keywords:
        raise ArgumentError(
            f"{', '.join(keywords)}: for a model that is loaded by name; this one is loaded, leave it out"
        )


def _argument_names(function: Callable[..., Any] | None) -> list[str]:
    parameters = {} if function is None else inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
