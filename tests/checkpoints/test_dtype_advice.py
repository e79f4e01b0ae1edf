"""A model that was saved in a dtype that is slow on this CPU names the faster one when it is loaded."""

import warnings

import pytest
import torch

from helpers.models import tiny_model
from redrafter import PromptLookup
from redrafter.checkpoints import models


@pytest.mark.parametrize(
    ("native", "saved", "faster"),
    [
        (False, torch.bfloat16, "float32"),
        (False, torch.float16, "float32"),
        (False, torch.float32, None),
        (True, torch.float32, "bfloat16"),
        (True, torch.bfloat16, None),
    ],
)
def test_loading_names_the_faster_dtype_of_this_cpu(native, saved, faster, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    monkeypatch.setattr(models, "LARGE_BYTES", 0)
    tiny_model("llama").to(saved).save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PromptLookup.from_pretrained(tmp_path, dtype="auto", device="cpu")
        PromptLookup.from_pretrained(tmp_path, dtype=saved, device="cpu")  # chosen, so nothing is recommended
    said = [str(each.message) for each in caught if "--dtype" in str(each.message)]
    assert len(said) == (faster is not None)
    assert all(f"--dtype {faster}" in each for each in said)
