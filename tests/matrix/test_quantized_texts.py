"""Drafts leave the texts of quantised bases as they are, in every packed format."""

from argparse import Namespace

import pytest

pytest.importorskip("gguf")

from helpers.models import tiny_model
from helpers.quantized_texts import FORMATS, compare
from redrafter.checkpoints import quantization

PACKED = ["AWQ", *(name for name in FORMATS if name.startswith(("GPTQ", "W"))), "int4", "int8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_each_method_writes_what_undrafted_decoding_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "is_fast", lambda device: True)
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "base")
    args = Namespace(tokens=8, rows=2, device="cpu", drafter=None)
    found = compare(FORMATS[name](tmp_path / "made", tmp_path / "base"), [[5, 6], [7, 8, 9], [4, 3]], args)
    methods = [value for key, value in found.items() if key.endswith(("greedy", "T=1"))]
    assert [method["equal"] for method in methods] == [3] * 5
