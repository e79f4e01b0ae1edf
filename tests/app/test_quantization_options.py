"""The options that quantise a model and what drafts for it reach the engine."""

import pytest

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.model.linear_layers import has_float8_layers


@pytest.mark.parametrize("option", ["quantization", "draft_quantization"])
def test_the_model_or_what_drafts_is_quantised(option):
    engine = Pair.load(LoadOptions(device="cpu", **{option: "fp8"})).engine
    assert has_float8_layers(engine.model) == (option == "quantization")
    assert has_float8_layers(engine.drafter) == (option == "draft_quantization")
