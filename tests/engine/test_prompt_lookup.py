"""Engines are loaded in one way."""

import inspect

import pytest

from redrafter import ArgumentError, DraftTarget, PromptLookup, ReDrafter
from redrafter.engine.options import EngineOptions

# Besides what drafts, which each engine has names of its own for.
COMMON = ["model", "dtype", "device", "trust_remote_code", *EngineOptions.__dataclass_fields__, "model_kwargs"]


SIGNATURES = [inspect.signature(engine.from_pretrained) for engine in (ReDrafter, DraftTarget, PromptLookup)]


@pytest.mark.parametrize("name", COMMON)
def test_an_argument_is_the_same_for_all_engines(name):
    parameters = [signature.parameters[name] for signature in SIGNATURES]
    assert len({(parameter.kind, parameter.default) for parameter in parameters}) == 1


@pytest.mark.parametrize("signature", SIGNATURES, ids=["ReDrafter", "DraftTarget", "PromptLookup"])
def test_engines_are_loaded_with_the_same_arguments(signature):
    assert [name for name in signature.parameters if name in COMMON] == COMMON
    assert "options" not in signature.parameters


def test_what_an_engine_may_use_is_checked_first():
    with pytest.raises(ArgumentError, match="max_seq_len must be an integer"):
        PromptLookup.from_pretrained("nowhere", max_seq_len="many")
