"""Which dtype and device a model is loaded in, and which are recommended."""

import warnings

import pytest
import torch

from helpers.models import tiny_model
from redrafter.checkpoints import models
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.models import load_model

LOAD = {"device": "cpu", "trust_remote_code": False}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return what loads a model saved in a dtype, on a CPU that multiplies bfloat16 numbers or does not."""
    monkeypatch.setattr(models, "LARGE_BYTES", 0)

    def saved_and_loaded(saved: torch.dtype, asked: object, *, native: bool) -> torch.dtype:
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda: native)
        tiny_model("llama").to(saved).save_pretrained(tmp_path)
        return load_model(tmp_path, dtype=asked, **LOAD).dtype

    return saved_and_loaded


@pytest.mark.parametrize("saved", [torch.float32, torch.float16])
def test_bfloat16_is_recommended_where_the_cpu_multiplies_it_and_the_model_is_saved_otherwise(load, saved):
    with pytest.warns(UserWarning, match="--dtype bfloat16"):
        assert load(saved, "auto", native=True) == saved


@pytest.mark.parametrize(
    ("saved", "asked", "native"),
    [(torch.bfloat16, "auto", True), (torch.float32, "float32", True), (torch.float32, "auto", False)],
)
def test_no_dtype_is_recommended_where_one_is_named_or_none_is_known_to_be_faster(load, saved, asked, native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(saved, asked, native=native) == saved


@pytest.mark.parametrize("where", [{}, {"device": "cpu"}, {"device_map": "cpu"}])
def test_a_gpu_is_recommended_only_where_no_device_was_named(tmp_path, monkeypatch, where):
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(tmp_path, dtype="float32", trust_remote_code=False, **({"device": None} | where))
    assert [str(each.message) for each in caught if "device='cuda'" in str(each.message)] == (
        [] if where else [f"{tmp_path} is on the CPU: device='cuda' decodes on the GPU"]
    )


def test_norms_that_identify_a_base_do_not_depend_on_the_default_dtype():
    table = torch.nn.Embedding(1000, 2)  # bfloat16 rounds 999 to 1000, past the end
    expected = embedding_norms(table)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert embedding_norms(table) == expected
    finally:
        torch.set_default_dtype(before)
