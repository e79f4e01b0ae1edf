"""The options that quantise a model and what drafts for it reach the engine."""

import pytest

from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.model.linear_layers import float8_scheme


@pytest.mark.parametrize("option", ["quantization", "draft_quantization"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_dynamic"])
def test_the_model_or_what_drafts_is_quantised(option, scheme):
    options = {option: scheme}
    engine = Pair.load(LoadOptions(device="cpu", **options)).engine
    assert float8_scheme(engine.model) == options.get("quantization")
    assert float8_scheme(engine.drafter) == options.get("draft_quantization")
