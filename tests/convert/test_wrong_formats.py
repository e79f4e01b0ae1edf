"""Converting refuses by name tensors, configs, ranks and options that do not fit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.conversion import (
    apple_dir,
    apple_tensors,
    changed,
    convert,
    refused,
    updated,
    weights,
    words,
)
from helpers.models import HIDDEN, VOCAB, tiny_drafter
from redrafter import RecurrentDrafter


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"lm_head.2.weight": None, "lm_head.9.weight": torch.ones(2)},
            ["no tensor lm_head.2.weight", "lm_head.9.weight"],
        ),
        ({"extra.weight": torch.ones(2)}, ["has a tensor extra.weight"]),
        ({"rnn_u.weight": torch.ones(3, HIDDEN)}, ["rnn_u.weight of shape (3, 32) instead of (32, 32)"]),
        ({"lm_heads.2.weight": torch.ones(VOCAB, 64)}, ["lm_head.2.weight and lm_heads.2.weight"]),
        *(
            ({"lm_head.2.weight": torch.ones(VOCAB, 64).to(dtype)}, ["lm_head.2.weight as"])
            for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn)  # in which nothing computes
        ),
    ],
    ids=["missing", "extra", "shape", "twice", "int64", "bool", "float8"],
)
def test_tensors_that_do_not_fit_their_config_are_named(tmp_path, capsys, change, says):
    apple = apple_dir(tmp_path / "apple", updated(apple_tensors(), change))
    message = refused(capsys, drafter=apple, to="drafter", output=tmp_path / "out")
    assert all(text in message for text in says)
    assert not (tmp_path / "out").exists()


class _Code:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> tuple:
        return print, ("this was run",)


def test_pickles_of_anything_but_tensors_are_not_loaded(apple, capsys):
    (apple / "model.safetensors").unlink()
    one = torch.ones(1)
    odd = [{1: one}, {"a": {"b": one}}, {"a": torch.ones(2, 2).to_sparse()}, [one]]
    cases = [(content, "no flat state dict") for content in odd]
    for content, says in [({"lm_head.2.weight": _Code()}, "model.pt holds more than tensors"), *cases]:
        torch.save(content, apple / "model.pt")
        assert says in refused(capsys, drafter=apple, to="drafter", dry_run=True)
    for content in (b"", b"nothing of the kind", b"\x80"):
        (apple / "model.pt").write_bytes(content)
        assert "model.pt" in refused(capsys, drafter=apple, to="drafter", dry_run=True)


def test_ranks_that_cannot_be_are_refused(pair, trtllm, tmp_path, capsys):
    out = {"output": tmp_path / "out"}
    for tp, says in ((3, "num_attention_heads=4; take 1, 2, 4"), (8, "does not divide"), (0, "must be from 1")):
        assert says in refused(capsys, **pair, **out, to="trtllm", tp_size=tp)
    odd = pair | {"drafter": apple_dir(tmp_path / "odd", exit_dim=25)}
    assert "exit_dim=25" in refused(capsys, **odd, **out, to="trtllm", tp_size=2)
    assert "--tp-size 4: " in refused(capsys, base=trtllm, to="trtllm", tp_size=4, **out)
    (trtllm / "rank1.safetensors").unlink()
    message = refused(capsys, drafter=trtllm, to="drafter", **out)
    assert "has no rank1.safetensors: its config.json says tp_size 2" in message
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_too_large_are_refused_and_nothing_is_left(tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple", apple_tensors() | {"rnn_u.bias": torch.full((HIDDEN,), 1e6)})
    message = refused(capsys, drafter=apple, to="drafter", dtype="float16", output=tmp_path / "out")
    assert "rnn_u.bias holds 1e+06, too much for float16" in message
    assert [path.name for path in tmp_path.iterdir()] == ["apple"]


def test_a_dry_run_shows_the_map_and_writes_nothing(pair, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    convert(None, **pair, to="trtllm", tp_size=2, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    [line] = [line.split() for line in lines if "rank1.safetensors: drafter.lm_head.weight" in line]
    assert line == ["lm_head.2.weight", "rank1.safetensors:", "drafter.lm_head.weight", "[49,", "64]", "float32"]
    convert(tmp_path / "out", **pair, dry_run=True)
    assert "drafter/model.safetensors: layers.1.linear.bias" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


WRONG_VALUES = {
    "hidden_size": [True],
    "exit_dim": [10**19],
    "vocab_size": ["97"],
    "num_draft_layers": [10**6, -1],
    "rnn": ["false"],
    "target_layers": [None, 3],
    "draft_vocab_size": [[1]],
    "trained_draft_len": ["2"],
    "base_embedding_norms": [[], ["a"] * 8],
    "dtype": ["x"],
}
WRONG_CONFIGS = [(name, value, "") for name, values in WRONG_VALUES.items() for value in values]
OTHER_TENSORS = [("num_draft_layers", 3, "layers.2"), ("draft_vocab_size", 49, "instead of")]


@pytest.mark.parametrize(("name", "value", "says"), [*WRONG_CONFIGS, *OTHER_TENSORS])
def test_a_drafters_config_that_cannot_be_is_refused(name, value, says, tmp_path, capsys):
    tiny_drafter(draft_vocab_size=50).save_pretrained(tmp_path / "ours")
    changed(tmp_path / "ours", **{name: value})
    message = refused(capsys, drafter=tmp_path / "ours", to="apple", output=tmp_path / "out")
    assert str(tmp_path / "ours") in message
    assert says in message
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


TRTLLM_VALUES = {
    "mapping": [[2], {"tp_size": "2"}, {"tp_size": 10**9}, {"tp_size": 2, "pp_size": 2}],
    "quantization": ["x"],
    "vocab_size": [...],
    "dtype": [5],
    "num_attention_heads": [0, 8],
    "num_key_value_heads": [4],
    "num_hidden_layers": [4],
    "intermediate_size": [40],
    "embedding_sharding_dim": [5],
    "redrafter_drafter_config": [[1]],
    "redrafter_greedy_search": ["yes"],
    "redrafter_is_rnn": ["false"],
    "redrafter_num_layers": [3],
    "base_model_architecture": [[], "FalconForCausalLM"],
}


@pytest.mark.parametrize("name", TRTLLM_VALUES)
def test_a_config_of_tensorrt_llm_that_cannot_be_is_refused(name, trtllm, tmp_path, capsys):
    changed(trtllm, redrafter_base_config=..., use_parallel_embedding=name == "embedding_sharding_dim")
    for value in TRTLLM_VALUES[name]:
        changed(trtllm, **{name: value})
        refused(capsys, base=trtllm, output=tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_tensors_that_ranks_do_not_share_are_named(trtllm, tmp_path, capsys):
    whole = load_file(trtllm / "rank0.safetensors")
    for change, says in (
        ({"drafter.rnn_w.weight": whole["drafter.rnn_w.weight"].half()}, "cannot be put together"),
        ({"drafter.rnn_w.weight": None}, "rank0.safetensors has no tensor drafter.rnn_w.weight"),
        ({"zzz": torch.ones(1)}, "rank1.safetensors has no tensor zzz"),
        ({"transformer.ln_f.weight": torch.ones(HIDDEN - 1)}, "of shape (31,) instead of (32,)"),
        ({"transformer.vocab_embedding.weight": torch.ones(VOCAB - 1, HIDDEN)}, "instead of (97, 32)"),
        ({"transformer.layers.0.attention.dense.weight": torch.ones(9)}, "cannot be put together"),
    ):
        save_file(updated(whole, change), trtllm / "rank0.safetensors")
        assert says in refused(capsys, base=trtllm, output=tmp_path / "out")
    save_file(whole, trtllm / "rank2.safetensors")
    assert "has a rank2.safetensors" in refused(capsys, drafter=trtllm, to="drafter", dry_run=True)
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_not_whole_is_refused(pair, tmp_path, capsys):
    base, whole = tmp_path / "base", weights(pair["base"])
    shutil.copytree(pair["base"], base)
    options = pair | {"base": base, "output": tmp_path / "out"}
    for change, says in (
        ({"model.norm.weight": None}, "no tensor model.norm.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": None}, "no tensor model.layers.0.self_attn.k_proj.weight"),
        ({"model.layers.0.self_attn.o_proj.weight": torch.ones(9)}, "instead of (32, 32)"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(9)}, "which its config does not ask for"),
    ):
        save_file(updated(whole, change), base / "model.safetensors")
        assert says in refused(capsys, **options, to="trtllm")
    for index, says in (
        ({}, "has no weight_map"),
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": {"a": "../b.safetensors"}}, "not a file of that directory"),
        ({"weight_map": {"a": 1}}, "not a file of that directory"),
        ({"weight_map": {"lost": "model.safetensors"}}, "tensors that no file has: lost"),
    ):
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        message = refused(capsys, **options)
        assert "index.json" in message
        assert says in message
    (base / "config.json").write_text("[" * 100_000)
    assert "is not JSON" in refused(capsys, **options)


def test_draft_ids_outside_of_the_vocabulary_are_refused(tmp_path, capsys):
    tiny_drafter(draft_vocab_size=20).save_pretrained(tmp_path)
    save_file(weights(tmp_path) | {"draft_ids": torch.arange(20) + VOCAB - 10}, tmp_path / "model.safetensors")
    assert "draft_ids outside" in refused(capsys, drafter=tmp_path, to="drafter", dry_run=True)


@pytest.mark.parametrize(
    "to, option",
    [
        ("apple", {"redrafter_num_beams": 3}),
        ("apple", {"copy": True}),
        ("apple", {"base_model_checkpoint_dir": "x"}),
        ("drafter", {"node_budget": 9}),
        ("drafter", {"redrafter_greedy_search": True}),
        ("trtllm", {"copy": True}),
        ("redrafter", {"tp_size": 2}),
        ("drafter", {"tokenizer_dir": "x"}),
    ],
)
def test_no_option_is_passed_over(to, option, apple, tmp_path, capsys):
    [flag, *_] = words(**option)
    assert f"{flag} is for --to" in refused(capsys, drafter=apple, to=to, output=tmp_path / "out", **option)


def test_neighbours_with_odd_names_are_left_alone(apple, tmp_path, capsys):
    names = (".mine.old", ".mine.partial", "mine")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    assert "is there already" in refused(capsys, drafter=apple, to="drafter", output=tmp_path / "mine")
    assert all((tmp_path / name / "precious").exists() for name in names)


def test_a_link_is_followed(apple, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for more in ({}, {"overwrite": True}, {"overwrite": True}):
        convert(tmp_path / "link", drafter=apple, to="drafter", **more)
        RecurrentDrafter.from_pretrained(tmp_path / "real")
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3
