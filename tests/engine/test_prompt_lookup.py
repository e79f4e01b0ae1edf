"""Engines are loaded in one way."""

import inspect

import pytest

from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter
from redrafter.engine.options import EngineOptions

# Besides what drafts, which each engine has names of its own for.
COMMON = ["model", "dtype", "device", "trust_remote_code", *EngineOptions.__dataclass_fields__, "model_kwargs"]


def test_engines_are_loaded_with_the_same_arguments():
    signatures = [inspect.signature(kind.from_pretrained) for kind in (ReDrafter, DraftTarget, PromptLookup)]
    for name in COMMON:
        kinds = {(each.parameters[name].kind, each.parameters[name].default) for each in signatures}
        assert len(kinds) == 1, name
    for signature in signatures:
        assert [name for name in signature.parameters if name in COMMON] == COMMON
        assert "options" not in signature.parameters


def test_what_an_engine_may_use_is_checked_first():
    with pytest.raises(ArgumentError, match="max_seq_len must be an integer"):
        PromptLookup.from_pretrained("nowhere", max_seq_len="many")
