"""The command `info`, in process on each kind of checkpoint."""

import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from helpers.command_line import (
    CONTEXT,
    fails,
    printed,
)
from redrafter import DrafterConfig, RecurrentDrafter
from redrafter.cli import main
from zoo.configs import tiny_config


def info(*args: str) -> dict:
    return printed("info", "--json", *args)


def test_info_tells_each_kind_of_checkpoint(folder):
    base, drafter, merged = (info(str(folder / name), "--check") for name in ("base", "drafter", "merged"))
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert base["kind"] == "model"
    assert "fits" not in base
    assert base["model"] == {
        "architecture": "LlamaForCausalLM",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "stored_as": "float32",
        "hidden_size": 32,
        "layers": 1,
        "vocabulary": 259,
        "context": CONTEXT,
        "target": "yes, by its config; it is tested when it is loaded",
    }
    assert drafter["kind"] == "drafter"
    head = RecurrentDrafter.from_pretrained(folder / "drafter")
    assert drafter["drafter"]["parameters"] == sum(parameter.numel() for parameter in head.parameters())
    assert drafter["drafter"]["draft_vocabulary"] == head.config.draft_vocab_size < drafter["drafter"]["vocabulary"]
    assert merged["kind"] == "merged checkpoint"
    assert merged["fits"] is True
    assert merged["model"] == base["model"]
    assert merged["shape"] == {"num_beams": 5, "draft_len_per_beam": 5, "node_budget": None, "greedy_search": None}


def test_info_says_why_a_drafter_does_not_fit(folder, capsys, tmp_path):
    config = {"vocab_size": 259, "hidden_size": 32, "base_model": "elsewhere"}
    RecurrentDrafter(DrafterConfig(**config, base_embedding_norms=[9.0] * 8)).save_pretrained(tmp_path / "other")
    document = info(str(folder / "base"), "--drafter", str(tmp_path / "other"))
    assert document["fits"] is False
    assert "elsewhere" in document["why_not"]
    assert main(["info", str(folder / "base"), "--drafter", str(folder / "drafter")]) == 0
    assert re.search(r"^fits +yes$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("model_type", "answer"),
    [
        ("rwkv", "no: RwkvForCausalLM has recurrent layers, and does not keep their state in transformers' cache"),
        ("bert", "no: BertLMHeadModel is not a decoder: its tokens see later ones"),
        ("t5", "no: transformers has no causal LM of the type t5; it is an encoder-decoder"),
        ("mamba", "yes, by its config"),
        ("mixtral", "yes, by its config"),
        ("longcat_flash", "not known before it is loaded"),
    ],
)
def test_info_says_whether_a_model_can_be_a_target_and_why_not(tmp_path, model_type, answer):
    config = tiny_config(model_type)
    if model_type == "bert":
        config.is_decoder = False
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert info(str(tmp_path), "--check")["model"]["target"].startswith(answer)


def test_info_alone_tells_versions():
    assert info()["environment"]["torch"] == torch.__version__


def test_info_mistakes(folder, capsys, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    assert "config.json" in fails(capsys, "info", str(tmp_path))
    assert "not a drafter" in fails(capsys, "info", str(folder / "base"), "--drafter", str(folder / "base"))
