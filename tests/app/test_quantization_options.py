"""The options that quantise a model and what drafts for it reach the engine, or are refused."""

import pytest

from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError
from redrafter.target.float8_linear import has_float8_layers


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"draft_quantization": "fp8"}], ids=str)
def test_the_model_or_what_drafts_is_quantised(options):
    engine = Pair.load(LoadOptions(device="cpu", **options)).engine
    assert has_float8_layers(engine.model) == ("quantization" in options)
    assert has_float8_layers(engine.drafter) == ("draft_quantization" in options)


def test_a_lookup_has_nothing_to_quantise():
    with pytest.raises(ArgumentError, match="--draft-quantization is for a drafter or --draft-model: leave it out"):
        Pair.load(LoadOptions(draft_quantization="fp8"), DraftOptions(prompt_lookup=True))
