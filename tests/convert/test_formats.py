"""Apple's and TensorRT-LLM's checkpoints: what is read, what is written, and that round trips lose nothing."""

import json
import multiprocessing
import re
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
from helpers.conversion import config, convert, refused, same, weights, words
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model
from redrafter import RecurrentDrafter, ReDrafter
from redrafter.cli import main

APPLE_NAMINGS = {"A": ("input_proj", "lm_head"), "B": ("input_projs", "lm_heads"), "C": ("input_proj", "0")}
FORMS = [
    {"exit_dim": exit_dim, "layers": layers, "rnn": rnn}
    for exit_dim in (2 * HIDDEN, 24)
    for layers in range(4)
    for rnn in (True, False)
]
PROMPT = torch.tensor([[5, 6, 7]])


def form_id(form: dict) -> str:
    return "-".join(map(str, form.values()))


def apple_tensors(
    exit_dim: int = 2 * HIDDEN, layers: int = 2, rnn: bool = True, naming: str = "A"
) -> dict[str, Tensor]:
    """Return random tensors of an Apple drafter by their published names, of generation A, B or C."""
    random = torch.Generator().manual_seed(exit_dim + layers)
    proj, heads = APPLE_NAMINGS[naming]
    shapes: dict[str, tuple[int, ...]] = {}
    if exit_dim != 2 * HIDDEN:
        shapes |= {f"{proj}.weight": (exit_dim, 2 * HIDDEN), f"{proj}.bias": (exit_dim,)}
    for i in range(layers):
        shapes |= {f"{heads}.{i}.linear.weight": (exit_dim, exit_dim), f"{heads}.{i}.linear.bias": (exit_dim,)}
    shapes[f"{heads}.{layers}.weight"] = VOCAB, exit_dim
    if rnn:
        shapes |= {"rnn_u.weight": (HIDDEN, HIDDEN), "rnn_u.bias": (HIDDEN,), "rnn_w.weight": (HIDDEN, HIDDEN)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return {name: x / 8 if name.endswith("linear.weight") else x for name, x in tensors.items()}


def apple_dir(place: Path, tensors: dict[str, Tensor] | None = None, naming: str = "A", **form: object) -> Path:
    """Write an Apple drafter of a form, or with these tensors, and return its directory."""
    place.mkdir()
    published = {
        "architectures": ["Drafter"],
        "emb_norm": False,
        "exit_dim": form.get("exit_dim", 2 * HIDDEN),
        "hidden_size": HIDDEN,
        "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": form.get("layers", 2),
        "num_lookback_tokens": -1,
        "rms_norm_eps": 1e-05,
        "rnn": form.get("rnn", True),
        "torch_dtype": "float32",
        "transformers_version": "4.44.0",
        "vocab_size": VOCAB,
    }
    (place / "config.json").write_text(json.dumps(published))
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


@pytest.fixture
def apple(tmp_path) -> Path:
    return apple_dir(tmp_path / "apple")


@pytest.fixture
def pair(bases, apple) -> dict[str, Path]:
    return {"base": bases / "llama", "drafter": apple}


@pytest.fixture
def trtllm(pair, tmp_path) -> Path:
    """The pair as a checkpoint of TensorRT-LLM, for two ranks."""
    return convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2)


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64, where two orders of summation agree to 1e-9 however large the numbers are."""
    return {name: tensor.double() for name, tensor in tensors.items()}


def updated(tensors: dict[str, Tensor], change: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors with some replaced or added, and without those that are None in `change`."""
    return {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}


def changed(place: Path, **changes: object) -> None:
    """Edit the config.json of a directory; a value of `...` removes the key."""
    values = config(place) | changes
    (place / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


# Round trips


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_a_drafter_comes_back_as_it_was(form, bases, tmp_path):
    apple = apple_dir(tmp_path / "apple", **form)
    ours = convert(tmp_path / "ours", drafter=apple, to="drafter")
    for tp in (1, 2, 4):
        pair = {"base": bases / "llama", "drafter": ours}
        trtllm = convert(tmp_path / f"trtllm{tp}", **pair, to="trtllm", tp_size=tp, workers=2)
        again = convert(tmp_path / f"again{tp}", drafter=trtllm, to="drafter")
        back = convert(tmp_path / f"back{tp}", drafter=again, to="apple")
        for found, expected in ((back, apple), (again, ours)):
            assert same(weights(found), weights(expected))
            assert config(found) == config(expected)
    assert same(weights(convert(tmp_path / "direct", drafter=apple, to="apple")), weights(apple))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_half_precision_comes_back_bit_by_bit(dtype, bases, tmp_path):
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in apple_tensors().items()}
    pair = {"base": bases / "llama", "drafter": apple_dir(tmp_path / "apple", tensors)}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=2, dtype="float32")
    back = convert(tmp_path / "back", drafter=trtllm, to="apple", dtype=dtype)
    assert same(weights(back), tensors)
    assert config(back) == config(pair["drafter"]) | {"torch_dtype": dtype}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "biased", "scaled"])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_base_comes_back_as_it_was(name, tp, foreign, bases, apple, tmp_path, capsys):
    """Also from a checkpoint that this project did not write, whose config has none of this project's keys."""
    trtllm = convert(tmp_path / "trtllm", base=bases / name, drafter=apple, to="trtllm", tp_size=tp)
    if foreign:
        changed(trtllm, **{key: ... for key in config(trtllm) if key.endswith("_config")})
    merged = convert(tmp_path / "merged", base=trtllm)
    assert "no tokenizer" in capsys.readouterr().err
    assert same(weights(merged), weights(bases / name))
    if not foreign:
        ours, theirs = AutoConfig.from_pretrained(merged), AutoConfig.from_pretrained(bases / name)
        assert ours.to_diff_dict() == theirs.to_diff_dict()
    expected = AutoModelForCausalLM.from_pretrained(bases / name).generate(PROMPT, max_new_tokens=20, do_sample=False)
    engine = ReDrafter.from_pretrained(merged)
    for speculate in (True, False):
        assert torch.equal(engine.generate(PROMPT, max_new_tokens=20, speculate=speculate), expected)


def test_a_large_base_comes_back_in_several_files(trtllm, bases, tmp_path, monkeypatch):
    monkeypatch.setattr("redrafter.formats.tensors.MAX_FILE_BYTES", 20_000)
    merged = convert(tmp_path / "merged", base=trtllm)
    files = sorted(merged.glob("model*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    assert count > 2
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(tensors, weights(bases / "llama"))
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    expected = AutoModelForCausalLM.from_pretrained(bases / "llama").generate(PROMPT, max_new_tokens=9, do_sample=False)
    assert torch.equal(ReDrafter.from_pretrained(merged).generate(PROMPT, max_new_tokens=9), expected)


def test_a_merged_checkpoint_goes_to_tensorrt_llm_and_back(bases, apple, tmp_path):
    shape = {"redrafter_num_beams": 3, "redrafter_draft_len_per_beam": 4, "redrafter_no_greedy_search": True}
    merged = convert(tmp_path / "merged", base=bases / "qwen2", drafter=apple, **shape)
    trtllm = convert(tmp_path / "trtllm", base=merged, to="trtllm", tp_size=2)
    again = convert(tmp_path / "again", drafter=trtllm)
    for file in ("redrafter.json", "drafter/config.json"):
        assert json.loads((again / file).read_text()) == json.loads((merged / file).read_text())
    assert same(weights(again / "drafter"), weights(merged / "drafter"))


# What TensorRT-LLM finds


def gathered(ranks: list[dict[str, Tensor]], name: str, x: Tensor) -> Tensor:
    """Compute a column-parallel layer: each rank computes its rows of the weight, and the outputs are concatenated."""
    out = [x @ rank[f"{name}.weight"].T + rank.get(f"{name}.bias", torch.zeros((), dtype=x.dtype)) for rank in ranks]
    return torch.cat(out, dim=-1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS[::3], ids=form_id)
def test_ranks_together_compute_what_the_drafter_does(form, tp, bases, tmp_path):
    """With the recurrence of TensorRT-LLM's engine: no activation, and no bias at the first step."""
    pair = {"base": bases / "llama", "drafter": apple_dir(tmp_path / "apple", **form)}
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=tp)
    ranks = [doubled(load_file(trtllm / f"rank{rank}.safetensors")) for rank in range(tp)]
    ours = convert(tmp_path / "ours", drafter=trtllm, to="drafter", recurrence="trtllm")
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
        found = drafter.step(embedding, before, drafter.begin(hidden))
        torch.testing.assert_close(found, (logits[:, :VOCAB], state), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("naming", APPLE_NAMINGS)
@pytest.mark.parametrize("form", FORMS[::3], ids=form_id)
def test_apples_drafters_compute_the_same_here(form, naming, tmp_path):
    tensors = doubled(apple_tensors(**form))
    ours = convert(tmp_path / "ours", drafter=apple_dir(tmp_path / "apple", **form, naming=naming), to="drafter")
    drafter = RecurrentDrafter.from_pretrained(ours).double()
    hidden, *embeddings = torch.randn(4, 7, HIDDEN, dtype=torch.float64)
    state, before = torch.zeros_like(hidden), None

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))

    for embedding in embeddings:
        state = silu(linear("rnn_w", embedding) + linear("rnn_u", state)) if form["rnn"] else state + embedding
        x = torch.cat([hidden, state], dim=-1)
        x = x if form["exit_dim"] == 2 * HIDDEN else linear("input_proj", x)
        for i in range(form["layers"]):
            x = x + silu(linear(f"lm_head.{i}.linear", x))
        found, before = drafter.step(embedding, before, drafter.begin(hidden))
        torch.testing.assert_close(found, linear(f"lm_head.{form['layers']}", x), rtol=1e-9, atol=1e-9)


def test_query_key_and_value_are_split_by_heads(pair, tmp_path):
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=4)
    layer = {name: x for name, x in weights(pair["base"]).items() if name.startswith("model.layers.1.")}
    query, key, value, output = (layer[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkvo")
    for rank in range(4):  # 4 query heads of 8, 2 key heads: ranks 0 and 1 hold the first of those
        mine, held = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        found = load_file(trtllm / f"rank{rank}.safetensors")
        expected = {
            "attention.qkv": torch.cat([query[mine], key[held], value[held]]),
            "mlp.fc": layer["model.layers.1.mlp.gate_proj.weight"][rank * 12 :][:12],
            "attention.dense": output[:, mine],
        }
        for name, tensor in expected.items():
            assert torch.equal(found[f"transformer.layers.1.{name}.weight"], tensor)
        assert found["lm_head.weight"].shape == (25, HIDDEN)


def test_the_config_says_what_their_script_says(bases, apple, tmp_path):
    options = {"to": "trtllm", "tp_size": 2, "redrafter_num_beams": 7}
    found = config(convert(tmp_path / "trtllm", base=bases / "qwen2", drafter=apple, **options))
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


def test_a_drafter_joins_a_base_of_tensorrt_llm_as_it_is(trtllm, tmp_path):
    """Quantised ones too: nothing of the base is read but its names."""
    changed(trtllm, quantization={"quant_algo": "FP8", "exclude_modules": ["lm_head"]})
    for rank in range(2):
        tensors = load_file(trtllm / f"rank{rank}.safetensors")
        tensors["transformer.layers.0.mlp.fc.weights_scaling_factor"] = torch.tensor(0.5)
        save_file(tensors, trtllm / f"rank{rank}.safetensors")
    other = apple_dir(tmp_path / "other", layers=3)
    new = convert(tmp_path / "new", base=trtllm, drafter=other, to="trtllm")
    for rank in range(2):
        before, after = (load_file(place / f"rank{rank}.safetensors") for place in (trtllm, new))
        base = {name: tensor for name, tensor in before.items() if not name.startswith("drafter.")}
        assert same({name: after[name] for name in base}, base)
        assert "drafter.layers.2.linear.bias" in after
    excluded = set(config(new)["quantization"]["exclude_modules"])
    assert {"lm_head", "drafter", "drafter.layers.2.linear", "drafter.rnn_u"} <= excluded
    assert same(weights(convert(tmp_path / "back", drafter=new, to="apple")), weights(other))


# What comes in otherwise


def write_sharded(tensors: dict[str, Tensor], place: Path) -> None:
    files = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(
    "write",
    [
        lambda tensors, place: torch.save(tensors, place / "model.pt"),
        lambda tensors, place: torch.save(tensors, place / "model.pt", _use_new_zipfile_serialization=False),
        write_sharded,
    ],
    ids=["pickle", "old pickle", "shards"],
)
def test_pickles_and_shards_are_read(write, apple, tmp_path):
    expected = convert(tmp_path / "expected", drafter=apple, to="drafter")
    (apple / "model.safetensors").unlink()
    write(apple_tensors(), apple)
    assert same(weights(convert(tmp_path / "ours", drafter=apple, to="drafter")), weights(expected))


def test_the_unused_norm_of_some_checkpoints_goes_all_the_way(bases, tmp_path):
    tensors = apple_tensors() | {"emb_norm.weight": torch.ones(HIDDEN)}
    ours = convert(tmp_path / "ours", drafter=apple_dir(tmp_path / "apple", tensors), to="drafter")
    RecurrentDrafter.from_pretrained(ours)
    trtllm = convert(tmp_path / "trtllm", base=bases / "llama", drafter=ours, to="trtllm", tp_size=2)
    assert same(weights(convert(tmp_path / "back", drafter=trtllm, to="apple")), tensors)


def test_which_recurrence_is_read_is_said(pair, tmp_path, capsys):
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm")
    assert "another recurrence" in capsys.readouterr().err
    for chosen in ("apple", "trtllm"):
        ours = convert(tmp_path / f"read-{chosen}", drafter=trtllm, to="drafter", recurrence=chosen)
        assert f"recurrence {chosen}" in capsys.readouterr().err
        assert config(ours)["recurrence"] == chosen


def test_greedy_search_is_the_default_of_do_sample(pair, tmp_path):
    merged = convert(tmp_path / "merged", **pair, redrafter_no_greedy_search=True)
    engine, more = ReDrafter.from_pretrained(merged), {"max_new_tokens": 12, "seed": 3}
    sampled, greedy = (engine.generate(PROMPT, do_sample=do_sample, **more) for do_sample in (True, False))
    assert not torch.equal(sampled, greedy)
    assert torch.equal(engine.generate(PROMPT, **more), sampled)
    said = json.loads((merged / "redrafter.json").read_text())
    for greedy_search, expected in ((True, greedy), (None, greedy), (False, sampled)):
        (merged / "redrafter.json").write_text(json.dumps(said | {"greedy_search": greedy_search}))
        assert torch.equal(ReDrafter.from_pretrained(merged).generate(PROMPT, **more), expected)


def test_the_base_of_a_drafter_is_remembered_and_another_one_refused_in_every_format(pair, bases, tmp_path, capsys):
    """Apple's drafters do not say whose they are; once merged, they do."""
    bound = convert(tmp_path / "bound", **pair)
    assert config(bound / "drafter")["base_model"] == "llama"
    assert len(config(bound / "drafter")["base_embedding_norms"]) == 8
    other = convert(tmp_path / "other", base=bases / "qwen2", drafter=pair["drafter"], to="trtllm")
    for base, to in ((bases / "qwen2", "redrafter"), (other, "redrafter"), (other, "trtllm"), (other, "drafter")):
        message = refused(capsys, base=base, drafter=bound, to=to, output=tmp_path / "out")
        assert "made for another base" in message


def test_a_trained_head_gets_a_first_stage_of_its_singular_vectors(bases, tmp_path, capsys):
    tiny_drafter(draft_vocab_size=40, context_window=4, head_rank=12).save_pretrained(tmp_path / "drafter")
    asked = {"drafter": tmp_path / "drafter", "head_shortlist": 6, "head_shortlist_rank": 5}
    before, made = weights(tmp_path / "drafter"), convert(tmp_path / "two", **asked, to="drafter")
    after = weights(made)
    u, s, v = torch.linalg.svd(before["lm_head.weight"])
    product = after["shortlist.head.weight"] @ after["shortlist.proj.weight"]
    torch.testing.assert_close(product, (u[:, :5] * s[:5]) @ v[:5])
    assert same(before, {name: x for name, x in after.items() if not name.startswith("shortlist")})
    assert RecurrentDrafter.from_pretrained(made).config.head_shortlist == 6
    merged = convert(tmp_path / "merged", base=bases / "llama", **asked)
    assert same(weights(merged / "drafter"), after)
    capsys.readouterr()
    assert main(["info", str(made)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"head shortlist +6\n", shown)
    assert re.search(r"head shortlist rank +5\n", shown)
    bad = asked | {"head_shortlist_rank": 13}
    message = refused(capsys, **bad, to="drafter", output=tmp_path / "out")
    assert message.strip().endswith("--head-shortlist-rank must be from 1 to the head's width 12, got 13")


@pytest.mark.parametrize("to", ["apple", "trtllm"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recurrence": "gated"}, "recurrence='gated'"),
        ({"target_layers": (0,)}, "target_layers=[0]"),
        ({"context_window": 8}, "context_window=8; --to redrafter or --to drafter keeps it"),
        ({"head_rank": 8}, "head_rank=8"),
        ({"head_shortlist": 8}, "head_shortlist=8"),
        ({"draft_vocab_size": 40}, "draft_vocab_size=40"),
    ],
)
def test_what_a_format_cannot_hold_is_named(bases, tmp_path, capsys, change, says, to):
    tiny_drafter(**change).save_pretrained(tmp_path / "drafter")
    base = {"base": bases / "llama"} if to == "trtllm" else {}
    message = refused(capsys, **base, drafter=tmp_path / "drafter", to=to, output=tmp_path / "out")
    assert f"cannot hold {says}" in message
    assert not (tmp_path / "out").exists()


# Bad input


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
    for tp, says in ((3, "num_attention_heads=4; possible are 1, 2, 4"), (8, "does not divide"), (0, "must be from 1")):
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


def test_a_full_disk_is_seen_before(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 70_000_000})())
    monkeypatch.setattr("redrafter.convert.plan.ConversionPlan.bytes_to_write", lambda self, output: 10_000_000_000)
    message = refused(capsys, **pair, output=tmp_path / "o")
    assert "will take 10.0 GB" in message
    assert "0.1 GB free" in message


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
        ({"weight_map": {"a": "../b.safetensors"}}, "no file of that directory"),
        ({"weight_map": {"a": 1}}, "no file of that directory"),
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
        ("drafter", {"redrafter_no_greedy_search": True}),
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


# Large ones


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, Path]:
    """Return a base of 300 MB, mostly zeros in sparse files, and a drafter for it."""
    folder = tmp_path_factory.mktemp("large")
    tiny_model("llama", intermediate_size=200_000).config.save_pretrained(folder / "base")
    widths = {"gate_proj": (200_000, 32), "up_proj": (200_000, 32), "down_proj": (32, 200_000)}
    place, header = 0, {}
    for name, tensor in tiny_model("llama").state_dict().items():
        shape = next((shape for part, shape in widths.items() if part in name), tuple(tensor.shape))
        end = place + 4 * torch.Size(shape).numel()
        header[name], place = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}, end
    head = json.dumps(header).encode()
    with (folder / "base" / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + place)
    return {"base": folder / "base", "drafter": apple_dir(folder / "apple")}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"to": "redrafter", "copy": True}, {"to": "trtllm", "tp_size": 2}], ids=str)
def test_a_killed_conversion_leaves_nothing_that_loads(more, large, tmp_path):
    """Unless all of it was written and it was only not renamed yet. The next conversion removes what it left."""

    def begin(name: str) -> multiprocessing.Process:
        return start(["convert", *words(**large, **more, output=tmp_path / name)], tmp_path / "said")

    def sizes(place: Path) -> dict[str, int]:
        return {str(f.relative_to(place)): f.stat().st_size for f in place.rglob("*") if f.is_file()}

    begin("whole").join()
    whole, left, outlived = sizes(tmp_path / "whole"), tmp_path / ".out.redrafter-partial", 0
    for delay in (0.0, 0.05, 0.1, 0.2, 0.4):
        process = begin("out")
        while process.is_alive() and not left.exists():
            time.sleep(0.005)
        process.join(delay)
        process.kill()
        process.join()
        outlived += process.exitcode == 0
        if (left / "config.json").exists() and (more["to"] == "trtllm" or (left / "redrafter.json").exists()):
            assert sizes(left) == whole
        if (tmp_path / "out").exists():
            assert sizes(tmp_path / "out") == whole
            shutil.rmtree(tmp_path / "out")
    assert outlived < 5
    process = begin("out")
    process.join()
    assert process.exitcode == 0
    assert sizes(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "said", "whole"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"copy": True}, {"to": "trtllm", "tp_size": 4}], ids=str)
def test_converting_takes_little_memory(more, large, tmp_path):
    """Only blocks of a few megabytes are in memory at a time."""
    script = (
        "import resource, sys; from redrafter.cli import main; from redrafter.convert import convert_checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert main(['convert', *sys.argv[1:]]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", script, *words(**large, **more, output=tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < 150_000, run.stdout  # KiB
