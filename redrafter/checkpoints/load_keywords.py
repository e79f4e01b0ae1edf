"""Keywords of `from_pretrained` that are nobody's: named, with what may have been meant."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from redrafter.errors import ArgumentError
from redrafter.spelling import nearest

__all__ = ["check_none_left", "check_reserved", "unknown_keyword"]

# Names of the same thing elsewhere, and what to type here: the first whose keyword the caller has.
_SAME = {
    "acceptance_threshold": ("acceptance",),
    "assistant_model": ("draft_model",),
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


def unknown_keyword(
    error: Exception, given: Mapping[str, Any], caller: Callable[..., Any] | None
) -> ArgumentError | None:
    """Return the error for a keyword that transformers handed on to a model, which knows it no better; None where that
    is not what went wrong. caller: the `from_pretrained` that took it."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    if found is None or found[1] not in given:
        return None
    name, own = found[1], _keywords(caller)
    known = [each for each in _SAME.get(name, ()) if each.partition("=")[0] in own]
    meant = known[0] if known else nearest(name, own)
    hint = f"; did you mean {meant}?" if meant else ""
    return ArgumentError(f"from_pretrained() has no argument {name!r}, here or in transformers{hint}")


def check_reserved(given: Mapping[str, Any], caller: Callable[..., Any] | None) -> None:
    """Refuse keywords of transformers that would be passed over, or are set here."""
    if "torch_dtype" in given:
        raise ArgumentError(f"from_pretrained() takes dtype={given['torch_dtype']!r} for torch_dtype")
    if "output_loading_info" in given:
        raise ArgumentError("from_pretrained() returns an engine alone: leave out output_loading_info")


def check_none_left(given: Mapping[str, Any]) -> None:
    """Refuse keywords for loading a model that is loaded already."""
    if given:
        raise ArgumentError(f"{', '.join(given)}: for a model that is loaded by name; this one is loaded, leave it out")


def _keywords(caller: Callable[..., Any] | None) -> list[str]:
    parameters = {} if caller is None else inspect.signature(caller).parameters
    return [name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
