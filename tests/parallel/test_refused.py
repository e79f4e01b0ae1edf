"""What cannot be shared by ranks, and what a shared model is not used for, each refused by name."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import tiny_model
from redrafter import ArgumentError, PromptLookup, UnsupportedError
from redrafter.checkpoints.models import check_loaded_size, check_splits, split_device
from redrafter.features import TENSOR_PARALLELISM
from redrafter.model.target import Target
from redrafter.parallel.ranks import Ranks


@pytest.fixture
def shared() -> Target:
    """A target that believes that another rank has a part of it."""
    target = Target(tiny_model("llama"))
    target.ranks = Ranks(rank=0, size=2)
    target.features.add(TENSOR_PARALLELISM)
    return target


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda target: target.make_batch_invariant(), "tensor parallelism"),
        (
            lambda target: PromptLookup.from_pretrained(target, kv_host_cache_gib=1),
            "kv_host_cache_gib .* tensor parallelism",
        ),
    ],
    ids=["batch invariance", "prefixes on the host"],
)
def test_a_shared_model_is_not_used_for(shared, use, says):
    with pytest.raises(UnsupportedError, match=says):
        use(shared)


def test_a_shared_model_sees_no_images(shared):
    shared.image_arguments = frozenset({"pixel_values"})
    assert "tensor parallelism" in shared.images.support.reason


def quantised() -> PreTrainedModel:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: tiny_model("mamba", num_hidden_layers=1, state_size=4),
            "recurrent states and tensor parallelism exclude .*without tp",
        ),
        (quantised, "quantised and tensor parallelism exclude .*without tp"),
    ],
)
def test_a_model_is_not_shared(monkeypatch, make, says):
    monkeypatch.setattr("redrafter.model.target.use_local_shards", lambda model: Ranks(rank=0, size=2))
    with pytest.raises(UnsupportedError, match=says):
        Target(make())


def without_plan() -> PreTrainedModel:
    model = tiny_model("gpt_neox")
    model.config.base_model_tp_plan = None
    return model


@pytest.mark.parametrize(
    ("make", "tp_size", "error", "says"),
    [
        *((lambda: tiny_model("llama"), size, ArgumentError, "positive integer") for size in (0, -1, True, 2.0)),
        *(
            (lambda: tiny_model("llama"), size, ArgumentError, f"tp_size={size} does not divide .* take 1, 2 or 4")
            for size in (3, 8)  # of 4 heads and 2 key-value heads
        ),
        (
            lambda: tiny_model("llama", num_attention_heads=1, num_key_value_heads=1),
            *(2, ArgumentError, "has one head, which cannot"),
        ),
        (without_plan, 2, UnsupportedError, "no tensor-parallel plan"),
        (quantised, 2, UnsupportedError, "quantised"),
    ],
)
def test_how_a_model_cannot_be_split_is_said(tmp_path, make: Callable, tp_size, error, says):
    with pytest.raises(error, match=says):
        check_splits(str(tmp_path), tp_size, False, {"config": make().config})


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"tp_size": 2}, ArgumentError, "torchrun --nproc-per-node 2"),
        ({"tp_size": 2, "quantization": "fp8"}, UnsupportedError, "leave out quantization='fp8'"),
        ({"tp_size": 2, "quantization": "int4"}, ArgumentError, "torchrun --nproc-per-node 2"),
        ({"drafter_tp_size": 2}, ArgumentError, "leave out drafter_tp_size"),  # a drafter is never split
    ],
)
def test_one_process_says_how_a_model_is_shared(tmp_path, arguments, error, says):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(error, match=says):
        PromptLookup.from_pretrained(tmp_path, **arguments)


def test_calls_that_join_running_ones_are_refused(llama):
    engine = PromptLookup.from_pretrained(llama)
    engine.target.features.add(TENSOR_PARALLELISM)
    with pytest.raises(UnsupportedError, match=r"agenerate\(\) and astream\(\) and tensor parallelism"):
        asyncio.run(engine.agenerate(torch.tensor([[3, 4]])))


def test_a_loaded_model_cannot_be_split_any_more(llama):
    with pytest.raises(ArgumentError, match="loaded already, whole"):
        check_loaded_size(llama, 2)


def test_no_rank_chooses_its_device():
    with pytest.raises(ArgumentError, match="its own device"):
        split_device("cuda:3")
