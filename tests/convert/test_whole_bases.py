"""A base whose files contradict each other is refused by every command, from their headers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.command_line import fails
from helpers.conversion import refused
from redrafter import CheckpointError, PromptLookup

STALE = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def copy(base, tmp_path):
    return shutil.copytree(base, tmp_path / "base")


@pytest.mark.parametrize("owner", [0, 1])
def test_a_tensor_that_two_files_hold_is_refused_whichever_the_index_names(copy, apple, tmp_path, capsys, owner):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    parts = [{name: x for name, x in tensors.items() if ("layers.0" in name) != bool(n)} for n in range(2)]
    names = [f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)]
    weight_map = {name: names[n] for n in range(2) for name in parts[n]} | {STALE: names[owner]}
    parts[owner][STALE], parts[1 - owner][STALE] = tensors[STALE], torch.zeros_like(tensors[STALE])
    for name, part in zip(names, parts, strict=True):
        save_file(part, copy / name, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    says = f"{names[1]} holds {STALE}, which {names[0]} holds too"
    for to in ("redrafter", "trtllm"):
        assert says in refused(capsys, base=copy, drafter=apple, to=to, output=tmp_path / "out")
    assert says in fails(capsys, "info", str(copy), "--check")
    with pytest.raises(CheckpointError, match="holds too"):
        PromptLookup.from_pretrained(copy)
