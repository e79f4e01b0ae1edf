"""What a model that ranks share is not used for, each refused by name."""

import pytest

from helpers.models import tiny_model
from redrafter import PromptLookup, UnsupportedError
from redrafter.model.target import Target
from redrafter.parallel.ranks import Ranks


@pytest.fixture
def shared() -> Target:
    """A target that believes that another rank has a part of it."""
    target = Target(tiny_model("llama"))
    target.ranks = Ranks(rank=0, size=2)
    return target


def test_adapters(shared):
    with pytest.raises(UnsupportedError, match=r"poems is an adapter, .* tensor parallelism"):
        shared.load_adapter("poems", None, 1, 8)


def test_batch_invariance(shared):
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        shared.make_batch_invariant()


def test_prefixes_on_the_host(shared):
    with pytest.raises(UnsupportedError, match=r"kv_host_cache_gib .* tensor parallelism"):
        PromptLookup.from_pretrained(shared, kv_host_cache_gib=1)


def test_images(shared):
    shared.image_arguments = frozenset({"pixel_values"})
    assert "tensor parallelism" in shared.images.reason


def test_recurrent_states(monkeypatch):
    monkeypatch.setattr("redrafter.model.target.use_local_shards", lambda model: Ranks(rank=0, size=2))
    with pytest.raises(UnsupportedError, match=r"recurrent states, .* tensor parallelism"):
        Target(tiny_model("mamba", num_hidden_layers=1, state_size=4))


def test_quantised_weights(monkeypatch):
    monkeypatch.setattr("redrafter.model.target.use_local_shards", lambda model: Ranks(rank=0, size=2))
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match=r"is quantised, .* tensor parallelism"):
        Target(model)
