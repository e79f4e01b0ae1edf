"""Apple's and TensorRT-LLM's checkpoints: what is read, what is written, and that round trips lose nothing."""

import json
import multiprocessing
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
from helpers.conversion import (
    APPLE_NAMINGS,
    apple_dir,
    apple_tensors,
    changed,
    config,
    convert,
    refused,
    same,
    weights,
    words,
)
from helpers.models import HIDDEN, VOCAB, tiny_drafter, tiny_model
from redrafter import RecurrentDrafter, ReDrafter

FORMS = [
    {"exit_dim": exit_dim, "layers": layers, "rnn": rnn}
    for exit_dim in (2 * HIDDEN, 24)
    for layers in range(4)
    for rnn in (True, False)
]
PROMPT = torch.tensor([[5, 6, 7]])


def form_id(form: dict) -> str:
    return "-".join(map(str, form.values()))


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64, where two orders of summation agree to 1e-9 however large the numbers are."""
    return {name: tensor.double() for name, tensor in tensors.items()}


# Round trips


@pytest.mark.parametrize("form", FORMS, ids=form_id)
def test_a_drafter_comes_back_as_it_was(form, bases, tmp_path):
    apple = apple_dir(tmp_path / "apple", **form)
    ours = convert(tmp_path / "ours", drafter=apple, to="drafter")
    for tp in (1, 2, 4):
        pair = {"base": bases / "llama", "drafter": ours}
        trtllm = convert(tmp_path / f"trtllm{tp}", **pair, to="trtllm", tp_size=tp)
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


def test_ranks_have_their_heads_and_their_rows_or_columns_of_each_layer(pair, tmp_path):
    trtllm = convert(tmp_path / "trtllm", **pair, to="trtllm", tp_size=4)
    layer = {name: x for name, x in weights(pair["base"]).items() if name.startswith("model.layers.1.")}
    query, key, value, output = (layer[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkvo")
    for rank in range(4):  # 4 query heads of 8, 2 key heads: ranks 0 and 1 hold the first of those
        mine, held = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        found = load_file(trtllm / f"rank{rank}.safetensors")
        expected = {
            "attention.qkv": torch.cat([query[mine], key[held], value[held]]),
            "mlp.fc": layer["model.layers.1.mlp.gate_proj.weight"][rank * 12 :][:12],
            "mlp.gate": layer["model.layers.1.mlp.up_proj.weight"][rank * 12 :][:12],
            "mlp.proj": layer["model.layers.1.mlp.down_proj.weight"][:, rank * 12 :][:, :12],
            "post_layernorm": layer["model.layers.1.post_attention_layernorm.weight"],
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
    base = {"base": bases / "llama"} if to == "trtllm" else {}
    message = refused(capsys, **base, drafter=tmp_path / "drafter", to=to, output=tmp_path / "out")
    assert f"cannot hold {says}" in message
    assert not (tmp_path / "out").exists()


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
    """Only a tensor of 25 MB is in memory at a time."""
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
