"""Which dtype and device a model is loaded in, and which are recommended."""

import warnings

import pytest
import torch

from helpers.models import tiny_model
from redrafter.checkpoints.drafters import embedding_norms
from redrafter.checkpoints.models import load_model


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
    expected = embedding_norms(table.weight)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert embedding_norms(table.weight) == expected
    finally:
        torch.set_default_dtype(before)
