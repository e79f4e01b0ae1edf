"""Training and measuring drafters of bases with recurrent states."""

import json

import pytest
import torch

from helpers.models import VOCAB
from helpers.recurrent import recurrent_model
from helpers.training import base_dir, command
from redrafter import ReDrafter
from redrafter.cli import main as run_command
from redrafter.model.teacher import Teacher
from redrafter.train.train_drafter import main

FAMILIES = ("lfm2", "jamba", "mamba2", "qwen3_next", "zaya")
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_texts_packed_into_a_row_are_apart(architecture):
    first, second = torch.randint(3, VOCAB, (2, 1, 9), generator=torch.Generator().manual_seed(1)).unbind(0)
    segment = torch.tensor([[0] * 6 + [1] * 9, [2] * 9 + [3] * 6])
    tokens = torch.cat([torch.cat([first[:, :6], second], 1), torch.cat([second, first[:, :6]], 1)])
    with Teacher(recurrent_model(architecture), (1,)) as teacher:
        packed = teacher.read_batch(tokens, segment)
        alone = [teacher.read_batch(first[:, :6]), teacher.read_batch(second)]
    for name in ("hidden", "logits"):
        found, one, two = getattr(packed, name), *(getattr(output, name)[0] for output in alone)
        expected = torch.stack([torch.cat([one, two]), torch.cat([two, one])])
        assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("more", [[], ["--target-layers", "0,1"]], ids=["last layer", "with earlier layers"])
def test_a_drafter_of_a_hybrid_base_is_trained_and_drafts(tmp_path, more):
    base = base_dir(tmp_path / "base", **LFM2)
    assert main([*command(tmp_path, *more), "--epochs", "2"]) == 0
    engine = ReDrafter.from_pretrained(base, str(tmp_path / "out"))
    ids = torch.tensor([[40, 50, 60, 70]])
    expected = engine.model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False), expected)
    report = tmp_path / "report.json"
    asked = ["--prompts", str(tmp_path / "data.jsonl"), "--new-tokens", "8", "--device", "cpu", "--json", str(report)]
    assert run_command(["evaluate", "--model", base, "--drafter", str(tmp_path / "out"), *asked, "--explain"]) == 0
    assert json.loads(report.read_text().splitlines()[0])
