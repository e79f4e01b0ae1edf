"""Apple's and TensorRT-LLM's checkpoints: what is read, what is written, and that round trips lose nothing."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.apart import start
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model
from redrafter import RecurrentDrafter, ReDrafter
from redrafter.convert.convert_checkpoint import main

APPLE_NAMINGS = {"A": ("input_proj", "lm_head"), "B": ("input_projs", "lm_heads"), "C": ("input_proj", "0")}
FORMS = [
    {"exit_dim": exit_dim, "layers": layers, "rnn": rnn}
    for exit_dim in (2 * HIDDEN, 24)
    for layers in range(4)
    for rnn in (True, False)
]


def apple_tensors(
    exit_dim: int = 2 * HIDDEN, layers: int = 2, rnn: bool = True, naming: str = "A"
) -> dict[str, Tensor]:
    """Return random tensors of an Apple drafter by their published names, of generation A, B or C."""
    random = torch.Generator().manual_seed(exit_dim + layers)
    make = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    proj, heads = APPLE_NAMINGS[naming]
    tensors = {}
    if exit_dim != 2 * HIDDEN:
        tensors |= {f"{proj}.weight": make(exit_dim, 2 * HIDDEN), f"{proj}.bias": make(exit_dim)}
    for i in range(layers):
        tensors[f"{heads}.{i}.linear.weight"] = make(exit_dim, exit_dim) / 8
        tensors[f"{heads}.{i}.linear.bias"] = make(exit_dim)
    tensors[f"{heads}.{layers}.weight"] = make(VOCAB, exit_dim)
    if rnn:
        tensors |= {
            "rnn_u.weight": make(HIDDEN, HIDDEN),
            "rnn_u.bias": make(HIDDEN),
            "rnn_w.weight": make(HIDDEN, HIDDEN),
        }
    return tensors


def apple_config(exit_dim: int = 2 * HIDDEN, layers: int = 2, rnn: bool = True) -> dict:
    """Return the config of a published Apple drafter."""
    return {
        "architectures": ["Drafter"],
        "emb_norm": False,
        "exit_dim": exit_dim,
        "hidden_size": HIDDEN,
        "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": layers,
        "num_lookback_tokens": -1,
        "rms_norm_eps": 1e-05,
        "rnn": rnn,
        "torch_dtype": "float32",
        "transformers_version": "4.44.0",
        "vocab_size": VOCAB,
    }


def apple_dir(place: Path, tensors: dict[str, Tensor] | None = None, **form: object) -> Path:
    """Write an Apple drafter of a form, or with these tensors, and return its directory."""
    place.mkdir()
    naming = form.pop("naming", "A")
    (place / "config.json").write_text(json.dumps(apple_config(**form)))
    save_file(apple_tensors(**form, naming=naming) if tensors is None else tensors, place / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """Return a folder with bases that TensorRT-LLM's format can hold."""
    folder = tmp_path_factory.mktemp("bases")
    for name, model_type, changes in (
        ("llama", "llama", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("biased", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
        ("scaled", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
    ):
        tiny_model(model_type, **changes).save_pretrained(folder / name)
    return folder


def convert(output: Path, **options: object) -> Path:
    """Run `redrafter convert` with options, and return the output directory."""
    flags = {"output_dir": output} | options
    argv = [
        piece for name, value in flags.items() for piece in ([f"--{name}"] if value is True else [f"--{name}", value])
    ]
    assert main([str(piece) for piece in argv]) == 0
    return output


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two state dicts are equal bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64, where two orders of summation agree to 1e-9 however large the numbers are."""
    return {name: tensor.double() for name, tensor in tensors.items()}


def config(place: Path) -> dict:
    """Return the config.json of a directory."""
    return json.loads((place / "config.json").read_text())


# Round trips


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_a_drafter_comes_back_as_it_was(form, bases, tmp_path):
    apple = apple_dir(tmp_path / "apple", **form)
    ours = convert(tmp_path / "ours", drafter_model_dir=apple, to="drafter")
    for tp in (1, 2, 4):
        pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": ours}
        trtllm = convert(tmp_path / f"trtllm{tp}", **pair, to="trtllm", tp_size=tp, workers=2)
        again = convert(tmp_path / f"again{tp}", drafter_model_dir=trtllm, to="drafter")
        back = convert(tmp_path / f"back{tp}", drafter_model_dir=again, to="apple")
        assert same(load_file(back / "model.safetensors"), load_file(apple / "model.safetensors"))
        assert config(back) == config(apple)
        assert same(load_file(again / "model.safetensors"), load_file(ours / "model.safetensors"))
        assert config(again) == config(ours)
    direct = convert(tmp_path / "direct", drafter_model_dir=apple, to="apple")
    assert same(load_file(direct / "model.safetensors"), load_file(apple / "model.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_half_precision_comes_back_bit_by_bit(dtype, bases, tmp_path):
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in apple_tensors().items()}
    apple = apple_dir(tmp_path / "apple", tensors)
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2, dtype="float32")
    back = convert(tmp_path / "back", drafter_model_dir=trtllm, to="apple", dtype=dtype)
    assert same(load_file(back / "model.safetensors"), tensors)
    assert config(back) == config(apple) | {"torch_dtype": dtype}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "biased", "scaled"])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_base_comes_back_as_it_was(name, tp, foreign, bases, tmp_path, capsys):
    """Also from a checkpoint that this project did not write, whose config has none of this project's keys."""
    apple = apple_dir(tmp_path / "apple")
    pair = {"base_model_checkpoint_dir": bases / name, "drafter_model_dir": apple}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=tp)
    if foreign:
        own = {key: value for key, value in config(trtllm).items() if not key.endswith("_config")}
        (trtllm / "config.json").write_text(json.dumps(own))
    merged = convert(tmp_path / "merged", base_model_checkpoint_dir=trtllm)
    assert "no tokenizer" in capsys.readouterr().err
    assert same(load_file(merged / "model.safetensors"), load_file(bases / name / "model.safetensors"))
    if not foreign:
        ours, theirs = AutoConfig.from_pretrained(merged), AutoConfig.from_pretrained(bases / name)
        assert ours.to_diff_dict() == theirs.to_diff_dict()
    prompt = torch.tensor([[5, 6, 7]])
    expected = AutoModelForCausalLM.from_pretrained(bases / name).generate(prompt, max_new_tokens=20, do_sample=False)
    pair = ReDrafter.from_pretrained(merged)
    for speculate in (True, False):
        assert torch.equal(pair.generate(prompt, max_new_tokens=20, speculate=speculate), expected)


def test_a_large_base_comes_back_in_several_files(bases, tmp_path, monkeypatch):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm")
    monkeypatch.setattr("redrafter.convert.tensors.MAX_FILE_BYTES", 20_000)
    merged = convert(tmp_path / "merged", base_model_checkpoint_dir=trtllm)
    files = sorted(merged.glob("model*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(tensors, load_file(bases / "llama" / "model.safetensors"))
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    prompt = torch.tensor([[5, 6, 7]])
    expected = AutoModelForCausalLM.from_pretrained(bases / "llama").generate(prompt, max_new_tokens=9, do_sample=False)
    assert torch.equal(ReDrafter.from_pretrained(merged).generate(prompt, max_new_tokens=9), expected)


def test_a_merged_checkpoint_goes_to_tensorrt_llm_and_back(bases, tmp_path):
    pair = {"base_model_checkpoint_dir": bases / "qwen2", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    shape = {"redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 4, "redrafter_no_greedy_search": True}
    merged = convert(tmp_path / "merged", **pair, **shape)
    trtllm = convert(tmp_path / "trtllm", base_model_checkpoint_dir=merged, to="trtllm", tp_size=2)
    again = convert(tmp_path / "again", drafter_model_dir=trtllm)
    for file in ("redrafter.json", "drafter/config.json"):
        assert json.loads((again / file).read_text()) == json.loads((merged / file).read_text())
    assert same(load_file(again / "drafter/model.safetensors"), load_file(merged / "drafter/model.safetensors"))


# What TensorRT-LLM finds


def gathered(ranks: list[dict[str, Tensor]], name: str, x: Tensor) -> Tensor:
    """Compute a column-parallel layer: each rank computes its rows of the weight, and the outputs are concatenated."""
    out = [x @ rank[f"{name}.weight"].T + rank.get(f"{name}.bias", torch.zeros((), dtype=x.dtype)) for rank in ranks]
    return torch.cat(out, dim=-1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS[::3], ids=lambda form: "-".join(map(str, form.values())))
def test_ranks_together_compute_what_the_drafter_does(form, tp, bases, tmp_path):
    """With the recurrence of TensorRT-LLM's engine: no activation, and no bias at the first step."""
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple", **form)}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=tp)
    ranks = [doubled(load_file(trtllm / f"rank{rank}.safetensors")) for rank in range(tp)]
    ours = convert(tmp_path / "ours", drafter_model_dir=trtllm, to="drafter", recurrence="trtllm")
    drafter = RecurrentDrafter.from_pretrained(ours).double()
    first, second, hidden = torch.randn(3, 7, HIDDEN, dtype=torch.float64)
    state = gathered(ranks, "drafter.rnn_w", first) if form["rnn"] else first
    for embedding, before in ((first, None), (second, state)):
        if before is not None and form["rnn"]:
            state = gathered(ranks, "drafter.rnn_w", embedding) + gathered(ranks, "drafter.rnn_u", before)
        elif before is not None:
            state = before + embedding
        x = torch.cat([hidden, state], dim=-1)
        if form["exit_dim"] != 2 * HIDDEN:
            x = gathered(ranks, "drafter.input_proj", x)
        for layer in range(form["layers"]):
            x = x + silu(gathered(ranks, f"drafter.layers.{layer}.linear", x))
        logits = gathered(ranks, "drafter.lm_head", x)
        assert logits.shape[-1] == -(-VOCAB // tp) * tp
        assert not logits[:, VOCAB:].any()
        found, now = drafter.step(embedding, before, drafter.begin(hidden))
        torch.testing.assert_close(found, logits[:, :VOCAB], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(now, state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("naming", APPLE_NAMINGS)
@pytest.mark.parametrize("form", FORMS[::3], ids=lambda form: "-".join(map(str, form.values())))
def test_apples_drafters_compute_the_same_here(form, naming, tmp_path):
    apple = apple_dir(tmp_path / "apple", **form, naming=naming)
    tensors = doubled(apple_tensors(**form))
    ours = convert(tmp_path / "ours", drafter_model_dir=apple, to="drafter")
    drafter = RecurrentDrafter.from_pretrained(ours).double()
    hidden, *embeddings = torch.randn(4, 7, HIDDEN, dtype=torch.float64)
    state, before = torch.zeros_like(hidden), None
    for embedding in embeddings:
        if form["rnn"]:
            carried = state @ tensors["rnn_u.weight"].T + tensors["rnn_u.bias"]
            state = silu(embedding @ tensors["rnn_w.weight"].T + carried)
        else:
            state = state + embedding
        x = torch.cat([hidden, state], dim=-1)
        if form["exit_dim"] != 2 * HIDDEN:
            x = x @ tensors["input_proj.weight"].T + tensors["input_proj.bias"]
        for i in range(form["layers"]):
            x = x + silu(x @ tensors[f"lm_head.{i}.linear.weight"].T + tensors[f"lm_head.{i}.linear.bias"])
        found, before = drafter.step(embedding, before, drafter.begin(hidden))
        expected = x @ tensors[f"lm_head.{form['layers']}.weight"].T
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_query_key_and_value_are_split_by_heads(bases, tmp_path):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=4)
    base = load_file(bases / "llama" / "model.safetensors")
    query, key, value = (base[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    for rank in range(4):  # 4 query heads of 8, 2 key heads: ranks 0 and 1 hold the first of those
        mine, held = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        found = load_file(trtllm / f"rank{rank}.safetensors")
        expected = torch.cat([query[mine], key[held], value[held]])
        assert torch.equal(found["transformer.layers.1.attention.qkv.weight"], expected)
        assert torch.equal(
            found["transformer.layers.1.mlp.fc.weight"], base["model.layers.1.mlp.gate_proj.weight"][rank * 12 :][:12]
        )
        dense = base["model.layers.1.self_attn.o_proj.weight"][:, mine]
        assert torch.equal(found["transformer.layers.1.attention.dense.weight"], dense)
        assert found["lm_head.weight"].shape == (25, HIDDEN)


def test_the_config_says_what_their_script_says(bases, tmp_path):
    pair = {"base_model_checkpoint_dir": bases / "qwen2", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    found = config(convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2, redrafter_num_beams=7))
    expected = {
        "architecture": "ReDrafterForQWenLM",
        "base_model_architecture": "Qwen2ForCausalLM",
        "dtype": "float32",
        "head_size": 8,
        "redrafter_num_layers": 2,
        "redrafter_hidden_size": HIDDEN,
        "redrafter_exit_dim": 2 * HIDDEN,
        "redrafter_is_rnn": True,
        "redrafter_num_beams": 7,
        "redrafter_draft_len_per_beam": 5,
        "redrafter_greedy_search": True,
    }
    assert expected.items() <= found.items()
    assert found["mapping"]["tp_size"] == found["mapping"]["world_size"] == 2
    assert "rank" not in found["mapping"]


def test_a_drafter_joins_a_base_of_tensorrt_llm_as_it_is(bases, tmp_path):
    """Quantised ones too: nothing of the base is read but its names."""
    first, second = apple_dir(tmp_path / "first", layers=1), apple_dir(tmp_path / "second", layers=3)
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": first}
    old = convert(tmp_path / "old", **pair, to="trtllm", tp_size=2)
    said = config(old)
    said["quantization"] = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (old / "config.json").write_text(json.dumps(said))
    for rank in range(2):
        tensors = load_file(old / f"rank{rank}.safetensors")
        tensors["transformer.layers.0.mlp.fc.weights_scaling_factor"] = torch.tensor(0.5)
        save_file(tensors, old / f"rank{rank}.safetensors")
    new = convert(tmp_path / "new", base_model_checkpoint_dir=old, drafter_model_dir=second, to="trtllm")
    for rank in range(2):
        before, after = (load_file(place / f"rank{rank}.safetensors") for place in (old, new))
        base = {name: tensor for name, tensor in before.items() if not name.startswith("drafter.")}
        assert same({name: after[name] for name in base}, base)
        assert "drafter.layers.2.linear.bias" in after
    assert {"lm_head", "drafter", "drafter.layers.2.linear", "drafter.rnn_u"} <= set(
        config(new)["quantization"]["exclude_modules"]
    )
    back = convert(tmp_path / "back", drafter_model_dir=new, to="apple")
    assert same(load_file(back / "model.safetensors"), load_file(second / "model.safetensors"))


# What comes in otherwise


def test_pickles_and_shards_are_read(tmp_path):
    tensors = apple_tensors()
    expected = convert(tmp_path / "expected", drafter_model_dir=apple_dir(tmp_path / "apple"), to="drafter")
    pickled = apple_dir(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "model.pt")
    sharded = apple_dir(tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    files = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for place in (pickled, sharded):
        found = convert(tmp_path / f"{place.name}-ours", drafter_model_dir=place, to="drafter")
        assert same(load_file(found / "model.safetensors"), load_file(expected / "model.safetensors"))


def test_the_unused_norm_of_some_checkpoints_goes_all_the_way(bases, tmp_path):
    tensors = apple_tensors() | {"emb_norm.weight": torch.ones(HIDDEN)}
    apple = apple_dir(tmp_path / "apple", tensors)
    ours = convert(tmp_path / "ours", drafter_model_dir=apple, to="drafter")
    RecurrentDrafter.from_pretrained(ours)
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": ours}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2)
    back = convert(tmp_path / "back", drafter_model_dir=trtllm, to="apple")
    assert same(load_file(back / "model.safetensors"), tensors)


def test_which_recurrence_is_read_is_said(bases, tmp_path, capsys):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm")
    assert "another recurrence" in capsys.readouterr().err
    for chosen in ("apple", "trtllm"):
        ours = convert(tmp_path / f"read-{chosen}", drafter_model_dir=trtllm, to="drafter", recurrence=chosen)
        assert f"recurrence {chosen}" in capsys.readouterr().err
        assert config(ours)["recurrence"] == chosen


def test_greedy_search_is_the_default_of_do_sample(bases, tmp_path):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    merged = convert(tmp_path / "merged", **pair, redrafter_no_greedy_search=True)
    prompt, more = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 12, "seed": 3}
    engine = ReDrafter.from_pretrained(merged)
    sampled, greedy = (engine.generate(prompt, do_sample=do_sample, **more) for do_sample in (True, False))
    assert not torch.equal(sampled, greedy)
    assert torch.equal(engine.generate(prompt, **more), sampled)
    said = json.loads((merged / "redrafter.json").read_text())
    for greedy_search, expected in ((True, greedy), (None, greedy), (False, sampled)):
        (merged / "redrafter.json").write_text(json.dumps(said | {"greedy_search": greedy_search}))
        assert torch.equal(ReDrafter.from_pretrained(merged).generate(prompt, **more), expected)


def test_the_base_of_a_drafter_is_remembered(bases, tmp_path, capsys):
    """Apple's drafters do not say whose they are; once merged, they do."""
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    merged = convert(tmp_path / "merged", **pair)
    found = config(merged / "drafter")
    assert found["base_model"] == "llama"
    assert len(found["base_embedding_norms"]) == 8
    capsys.readouterr()
    argv = [
        "--base-model-checkpoint-dir",
        bases / "qwen2",
        "--drafter-model-dir",
        merged,
        "--output-dir",
        tmp_path / "x",
    ]
    assert main(list(map(str, argv))) == 2
    assert "made for another base" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["apple", "trtllm"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recurrence": "gated"}, "recurrence='gated'"),
        ({"target_layers": (0,)}, "target_layers=[0]"),
        ({"context_window": 8}, "context_window=8; --to redrafter or --to drafter keeps it"),
        ({"head_rank": 8}, "head_rank=8"),
        ({"draft_vocab_size": 40}, "draft_vocab_size=40"),
    ],
)
def test_what_a_format_cannot_hold_is_named(bases, tmp_path, capsys, change, says, to):
    tiny_drafter(**change).save_pretrained(tmp_path / "drafter")
    base = ["--base-model-checkpoint-dir", bases / "llama"] if to == "trtllm" else []
    words = [*base, "--drafter-model-dir", tmp_path / "drafter", "--to", to, "--output-dir", tmp_path / "out"]
    assert f"cannot hold {says}" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


# Bad input


def refused(capsys, *argv: object) -> str:
    """Run a conversion that must fail, and return its one line on stderr."""
    assert main([str(piece) for piece in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("redrafter: error: "), err
    assert err.count("\n") == 1, err
    return err


def updated(tensors: dict[str, Tensor], change: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors with some replaced or added, and without those that are None in `change`."""
    return {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}


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
    ],
    ids=["missing", "extra", "shape", "twice"],
)
def test_tensors_that_do_not_fit_their_config_are_named(tmp_path, capsys, change, says):
    apple = apple_dir(tmp_path / "apple", updated(apple_tensors(), change))
    err = refused(capsys, "--drafter-model-dir", apple, "--to", "drafter", "--output-dir", tmp_path / "out")
    for text in says:
        assert text in err
    assert not (tmp_path / "out").exists()


class _Code:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> tuple:
        return print, ("this was run",)


def test_a_pickle_with_code_in_it_is_not_loaded(tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    (apple / "model.safetensors").unlink()
    torch.save({"lm_head.2.weight": _Code()}, apple / "model.pt")
    err = refused(capsys, "--drafter-model-dir", apple, "--to", "drafter", "--output-dir", tmp_path / "out")
    assert "model.pt holds more than tensors" in err
    for content in (b"", b"nothing of the kind", b"\x80"):
        (apple / "model.pt").write_bytes(content)
        assert "model.pt" in refused(capsys, "--drafter-model-dir", apple, "--to", "drafter", "--dry-run")


def test_ranks_that_cannot_be_are_refused(bases, tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    pair = ["--base-model-checkpoint-dir", bases / "llama", "--drafter-model-dir", apple]
    to = [*pair, "--to", "trtllm", "--output-dir", tmp_path / "out"]
    for tp, says in ((3, "num_attention_heads=4; possible are 1, 2, 4"), (8, "does not divide"), (0, "must be from 1")):
        assert says in refused(capsys, *to, "--tp-size", tp)
    odd = apple_dir(tmp_path / "odd", exit_dim=25)
    assert "exit_dim=25" in refused(capsys, *to[:3], odd, *to[4:], "--tp-size", 2)
    trtllm = convert(
        tmp_path / "trtllm", base_model_checkpoint_dir=bases / "llama", drafter_model_dir=apple, to="trtllm", tp_size=4
    )
    capsys.readouterr()
    assert "--tp-size 2: " in refused(
        capsys,
        "--base-model-checkpoint-dir",
        trtllm,
        "--to",
        "trtllm",
        "--tp-size",
        2,
        "--output-dir",
        tmp_path / "out",
    )
    (trtllm / "rank2.safetensors").unlink()
    back = ["--drafter-model-dir", trtllm, "--to", "drafter", "--output-dir", tmp_path / "out"]
    assert "has no rank2.safetensors: its config.json says tp_size 4" in refused(capsys, *back)
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_too_large_are_refused_and_nothing_is_left(tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple", apple_tensors() | {"rnn_u.bias": torch.full((HIDDEN,), 1e6)})
    err = refused(
        capsys, "--drafter-model-dir", apple, "--to", "drafter", "--dtype", "float16", "--output-dir", tmp_path / "out"
    )
    assert "rnn_u.bias holds 1e+06, too much for float16" in err
    assert [path.name for path in tmp_path.iterdir()] == ["apple"]


def test_a_full_disk_is_seen_before(bases, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 70_000_000})())
    apple = apple_dir(tmp_path / "apple")
    monkeypatch.setattr("redrafter.convert.plan.ConversionPlan.bytes_to_write", lambda self, output: 10_000_000_000)
    err = refused(
        capsys,
        "--drafter-model-dir",
        apple,
        "--base-model-checkpoint-dir",
        bases / "llama",
        "--output-dir",
        tmp_path / "o",
    )
    assert "will take 10.0 GB" in err
    assert "0.1 GB free" in err


def test_a_dry_run_shows_the_map_and_writes_nothing(bases, tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    before = sorted(tmp_path.rglob("*"))
    pair = ["--base-model-checkpoint-dir", str(bases / "llama"), "--drafter-model-dir", str(apple)]
    assert main([*pair, "--to", "trtllm", "--tp-size", "2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line.split() for line in lines if "rank1.safetensors: drafter.lm_head.weight" in line]
    assert line == ["lm_head.2.weight", "rank1.safetensors:", "drafter.lm_head.weight", "[49,", "64]", "float32"]
    assert main([*pair, "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "drafter/model.safetensors: layers.1.linear.bias" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def changed(place: Path, **changes: object) -> None:
    """Edit the config.json of a directory; a value of `...` removes the key."""
    values = config(place) | changes
    (place / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": True},
        {"exit_dim": 10**19},
        {"vocab_size": "97"},
        {"num_draft_layers": 10**6},
        {"num_draft_layers": -1},
        {"rnn": "false"},
        {"target_layers": None},
        {"target_layers": 3},
        {"draft_vocab_size": [1]},
        {"trained_draft_len": "2"},
        {"base_embedding_norms": []},
        {"base_embedding_norms": ["a"] * 8},
        {"dtype": "x"},
    ],
    ids=str,
)
def test_a_drafters_config_that_cannot_be_is_refused(change, tmp_path, capsys):
    tiny_drafter().save_pretrained(tmp_path / "ours")
    changed(tmp_path / "ours", **change)
    err = refused(capsys, "--drafter-model-dir", tmp_path / "ours", "--to", "apple", "--output-dir", tmp_path / "out")
    assert str(tmp_path / "ours") in err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    "change",
    [
        {"mapping": [2]},
        {"mapping": {"tp_size": "2"}},
        {"mapping": {"tp_size": 10**9}},
        {"mapping": {"tp_size": 2, "pp_size": 2}},
        {"quantization": "x"},
        {"vocab_size": ...},
        {"dtype": 5},
        {"num_attention_heads": 0},
        {"num_attention_heads": 8},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 4},
        {"intermediate_size": 40},
        {"embedding_sharding_dim": 5, "use_parallel_embedding": True},
        {"redrafter_drafter_config": [1]},
        {"redrafter_greedy_search": "yes"},
        {"redrafter_is_rnn": "false"},
        {"redrafter_num_layers": 3},
        {"base_model_architecture": []},
        {"base_model_architecture": "FalconForCausalLM"},
    ],
    ids=str,
)
def test_a_config_of_tensorrt_llm_that_cannot_be_is_refused(change, bases, tmp_path, capsys):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2)
    changed(trtllm, redrafter_base_config=..., **change)
    capsys.readouterr()
    refused(capsys, "--base-model-checkpoint-dir", trtllm, "--output-dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_that_ranks_do_not_share_are_named(bases, tmp_path, capsys):
    pair = {"base_model_checkpoint_dir": bases / "llama", "drafter_model_dir": apple_dir(tmp_path / "apple")}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2)
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
        capsys.readouterr()
        assert says in refused(capsys, "--base-model-checkpoint-dir", trtllm, "--output-dir", tmp_path / "out")
    save_file(whole, trtllm / "rank2.safetensors")
    assert "has a rank2.safetensors" in refused(capsys, "--drafter-model-dir", trtllm, "--to", "drafter", "--dry-run")
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_not_whole_is_refused(bases, tmp_path, capsys):
    apple, base = apple_dir(tmp_path / "apple"), tmp_path / "base"
    shutil.copytree(bases / "llama", base)
    whole = load_file(base / "model.safetensors")
    pair = ["--base-model-checkpoint-dir", base, "--drafter-model-dir", apple]
    for change, says in (
        ({"model.norm.weight": None}, "no tensor model.norm.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": None}, "no tensor model.layers.0.self_attn.k_proj.weight"),
        ({"model.layers.0.self_attn.o_proj.weight": torch.ones(9)}, "instead of (32, 32)"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(9)}, "which its config does not ask for"),
    ):
        save_file(updated(whole, change), base / "model.safetensors")
        assert says in refused(capsys, *pair, "--to", "trtllm", "--output-dir", tmp_path / "out")
    for index in ({}, {"weight_map": None}, {"weight_map": {"a": "../b.safetensors"}}, {"weight_map": {"a": 1}}):
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "index.json" in refused(capsys, *pair, "--output-dir", tmp_path / "out")
    (base / "config.json").write_text("[" * 100_000)
    assert "is not JSON" in refused(capsys, *pair, "--output-dir", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_drafter_in_numbers_that_nothing_computes_in_is_refused(tmp_path, capsys, dtype):
    tensors = apple_tensors() | {"lm_head.2.weight": torch.ones(VOCAB, 64).to(dtype)}
    apple = apple_dir(tmp_path / "apple", tensors)
    assert "lm_head.2.weight as" in refused(capsys, "--drafter-model-dir", apple, "--to", "drafter", "--dry-run")


def test_draft_ids_outside_of_the_vocabulary_are_refused(tmp_path, capsys):
    ours = tmp_path / "ours"
    tiny_drafter(draft_vocab_size=20).save_pretrained(ours)
    tensors = load_file(ours / "model.safetensors") | {"draft_ids": torch.arange(20) + VOCAB - 10}
    save_file(tensors, ours / "model.safetensors")
    assert "draft_ids outside" in refused(capsys, "--drafter-model-dir", ours, "--to", "drafter", "--dry-run")


def test_a_drafter_of_another_base_is_refused_in_every_format(bases, tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    bound = convert(tmp_path / "bound", base_model_checkpoint_dir=bases / "qwen2", drafter_model_dir=apple)
    other = convert(tmp_path / "other", base_model_checkpoint_dir=bases / "llama", drafter_model_dir=apple, to="trtllm")
    capsys.readouterr()
    for to in ("redrafter", "trtllm", "drafter"):
        pair = ["--base-model-checkpoint-dir", other, "--drafter-model-dir", bound]
        assert "made for another base" in refused(capsys, *pair, "--to", to, "--output-dir", tmp_path / "out")


def test_state_dicts_in_the_old_form_are_read_and_odd_ones_refused(tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    expected = convert(tmp_path / "expected", drafter_model_dir=apple, to="drafter")
    (apple / "model.safetensors").unlink()
    torch.save(apple_tensors(), apple / "model.pt", _use_new_zipfile_serialization=False)
    ours = convert(tmp_path / "ours", drafter_model_dir=apple, to="drafter")
    assert same(load_file(ours / "model.safetensors"), load_file(expected / "model.safetensors"))
    capsys.readouterr()
    for odd in ({1: torch.ones(1)}, {"a": {"b": torch.ones(1)}}, {"a": torch.ones(2, 2).to_sparse()}, [torch.ones(1)]):
        torch.save(odd, apple / "model.pt")
        assert "no flat state dict" in refused(capsys, "--drafter-model-dir", apple, "--to", "drafter", "--dry-run")


@pytest.mark.parametrize(
    "to, flag",
    [
        ("apple", ["--redrafter-num-beams", "3"]),
        ("apple", ["--copy"]),
        ("apple", ["--base-model-checkpoint-dir", "x"]),
        ("drafter", ["--node-budget", "9"]),
        ("drafter", ["--redrafter-no-greedy-search"]),
        ("trtllm", ["--copy"]),
        ("redrafter", ["--tp-size", "2"]),
        ("drafter", ["--tokenizer-dir", "x"]),
    ],
)
def test_no_option_is_passed_over(to, flag, tmp_path, capsys):
    apple = apple_dir(tmp_path / "apple")
    err = refused(capsys, "--drafter-model-dir", apple, "--to", to, "--output-dir", tmp_path / "out", *flag)
    assert f"{flag[0]} is for --to" in err


def test_neighbours_with_odd_names_are_left_alone(tmp_path, capsys):
    apple, names = apple_dir(tmp_path / "apple"), (".mine.old", ".mine.partial", "mine")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    words = ["--drafter-model-dir", apple, "--to", "drafter", "--output-dir", tmp_path / "mine"]
    assert "is there already" in refused(capsys, *words)
    assert all((tmp_path / name / "precious").exists() for name in names)


def test_a_link_is_followed(tmp_path):
    apple = apple_dir(tmp_path / "apple")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for more in ({}, {"overwrite": True}, {"overwrite": True}):
        convert(tmp_path / "link", drafter_model_dir=apple, to="drafter", **more)
        RecurrentDrafter.from_pretrained(tmp_path / "real")
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


# Large ones


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Return a folder with a base of 300 MB, mostly zeros in sparse files, and a drafter for it."""
    folder = tmp_path_factory.mktemp("large")
    tiny_model("llama", intermediate_size=200_000).config.save_pretrained(folder / "base")
    size, width = {}, {"gate_proj": (200_000, 32), "up_proj": (200_000, 32), "down_proj": (32, 200_000)}
    for name, tensor in tiny_model("llama").state_dict().items():
        size[name] = next((shape for part, shape in width.items() if part in name), tuple(tensor.shape))
    place, header = 0, {}
    for name, shape in size.items():
        end = place + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name], place = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}, end
    head = json.dumps(header).encode()
    with (folder / "base" / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + place)
    apple_dir(folder / "apple")
    return folder


def words(large: Path, output: Path, *more: str) -> list[str]:
    """Return the words of a command line that converts the pair of the fixture `large`."""
    pair = ["--base-model-checkpoint-dir", str(large / "base"), "--drafter-model-dir", str(large / "apple")]
    return ["convert", *pair, "--output-dir", str(output), *more]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["redrafter", "trtllm"])
def test_a_killed_conversion_leaves_nothing_that_loads(to, large, tmp_path):
    """Unless all of it was written and it was only not renamed yet. The next conversion removes what it left."""
    more = ("--to", to, *(["--copy"] if to == "redrafter" else ["--tp-size", "2"]))
    sizes = lambda place: {str(f.relative_to(place)): f.stat().st_size for f in place.rglob("*") if f.is_file()}  # noqa: E731
    process = start(words(large, tmp_path / "whole", *more), tmp_path / "said")
    process.join()
    outlived = 0
    for delay in (0.0, 0.05, 0.1, 0.2, 0.4):
        process = start(words(large, tmp_path / "out", *more), tmp_path / "said")
        while process.is_alive() and not (tmp_path / ".out.redrafter-partial").exists():
            time.sleep(0.005)
        process.join(delay)
        process.kill()
        process.join()
        outlived += process.exitcode == 0
        left = tmp_path / ".out.redrafter-partial"
        if (left / "config.json").exists() and (to == "trtllm" or (left / "redrafter.json").exists()):
            assert sizes(left) == sizes(tmp_path / "whole")
        if (tmp_path / "out").exists():
            assert sizes(tmp_path / "out") == sizes(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
    assert outlived < 5
    process = start(words(large, tmp_path / "out", *more), tmp_path / "said")
    process.join()
    assert process.exitcode == 0
    assert sizes(tmp_path / "out") == sizes(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "said", "whole"]


@pytest.mark.slow
def test_converting_takes_little_memory(large, tmp_path):
    """Only blocks of a few megabytes are in memory at a time."""
    for number, more in enumerate((["--copy"], ["--to", "trtllm", "--tp-size", "4"])):
        script = (
            "import resource, sys; from redrafter.cli import main; from redrafter.convert import convert_checkpoint\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "assert main(sys.argv[1:]) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
        )
        run = subprocess.run(
            [sys.executable, "-c", script, *words(large, tmp_path / str(number), *more)], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout.split()[-1]) < 150_000, run.stdout  # KiB
