"""The options that quantise a model and what drafts for it reach the engine, or are refused."""

import pytest

from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError
from redrafter.model.linear_layers import float8_scheme


@pytest.mark.parametrize("option", ["quantization", "draft_quantization"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_dynamic"])
def test_the_model_or_what_drafts_is_quantised(option, scheme):
    options = {option: scheme}
    engine = Pair.load(LoadOptions(device="cpu", **options)).engine
    assert float8_scheme(engine.model) == options.get("quantization")
    assert float8_scheme(engine.drafter) == options.get("draft_quantization")


def test_a_lookup_has_nothing_to_quantise():
    with pytest.raises(ArgumentError, match="--draft-quantization is for a drafter or --draft-model: leave it out"):
        Pair.load(LoadOptions(draft_quantization="fp8"), DraftOptions(prompt_lookup=True))
