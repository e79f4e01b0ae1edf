"""GGUF files as models: tokens equal those of the same weights as safetensors, in every engine and command."""

import json
import re
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers.command_line import TEMPLATE, fails, printed, ran
from helpers.tokenizers import TEXTS

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Format

from helpers.gguf_files import make_models, split_gguf, write_gguf
from redrafter import (
    ArgumentError,
    CheckpointError,
    DrafterConfig,
    DraftTarget,
    MismatchError,
    PromptLookup,
    RecurrentDrafter,
    ReDrafter,
    UnsupportedError,
)
from redrafter.checkpoints.models import load_config, load_model
from redrafter.checkpoints.tokenizers import end_tokens, load_tokenizer
from redrafter.errors import MissingDependencyError
from redrafter.files.gguf_file import reading
from redrafter.kernels.grouped_linear import is_fast

LOAD = {"dtype": "float32", "device": "cpu", "trust_remote_code": False}
PROMPT, NEW = TEXTS[0][:20], 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with `hf`, a Llama of dequantised weights, `file.gguf`, the same in Q8_0, and `drafter` for both."""
    return make_models(tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def alone(models, tmp_path):
    """Return a copy of the file in a directory of its own."""
    return shutil.copy(models / "file.gguf", tmp_path / "one.gguf")


ENGINES = {
    "ReDrafter": lambda models, target: ReDrafter.from_pretrained(target, models / "drafter", dtype="float32"),
    "DraftTarget": lambda models, target: DraftTarget.from_pretrained(
        target, models / "file.gguf", num_beams=2, dtype="float32"
    ),
    "PromptLookup": lambda models, target: PromptLookup.from_pretrained(target, dtype="float32", quantization="gguf"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_gguf_file_writes_the_tokens_of_the_same_weights_as_safetensors(models, name):
    engine, tokenizer = ENGINES[name](models, models / "file.gguf"), load_tokenizer(models / "file.gguf")
    ids = load_tokenizer(models / "hf")(PROMPT, return_tensors="pt").input_ids
    assert torch.equal(tokenizer(PROMPT, return_tensors="pt").input_ids, ids)
    stock = AutoModelForCausalLM.from_pretrained(models / "hf")
    expected = stock.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=1)
    assert torch.equal(engine.generate(ids, max_new_tokens=NEW, do_sample=False), expected)
    assert torch.equal(engine.model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)


def test_a_widened_model_has_plain_layers_without_a_quantization_config(models):
    model = load_model(models / "file.gguf", quantization_config=GgufConfig(dequantize=True), **LOAD)
    stock = AutoModelForCausalLM.from_pretrained(models / "hf").state_dict()
    assert all(torch.equal(weight, stock[name]) for name, weight in model.state_dict().items())
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert getattr(model.config, "quantization_config", None) is None
    assert model.config.name_or_path == model.name_or_path == str(models / "file.gguf")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 1)


@pytest.mark.parametrize(
    ("matrices", "dtype"),
    [(Format.F32, "float32"), (Format.F16, "float16"), (Format.BF16, "bfloat16")],
)
def test_auto_is_the_dtype_of_the_file(models, tmp_path, matrices, dtype):
    model = load_model(models / "hf", **LOAD)
    file = write_gguf(tmp_path / "a.gguf", model, load_tokenizer(models / "hf"), matrices=matrices)
    assert load_config(file).dtype == load_model(file, **LOAD | {"dtype": "auto"}).dtype == getattr(torch, dtype)


def test_tokenizer_and_template_come_from_the_file_and_pad(models, alone, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):  # of another model
        (tmp_path / name).write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("another")
    tokenizer, stock = load_tokenizer(alone), load_tokenizer(models / "hf")
    assert tokenizer.get_vocab() == stock.get_vocab()
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.pad_token, tokenizer.padding_side) == (stock.eos_token, "left")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (stock.bos_token, stock.eos_token)
    assert all(tokenizer(text).input_ids == stock(text).input_ids for text in TEXTS[:9])


def test_the_token_that_ends_a_turn_ends_answers(models, tmp_path):
    file = write_gguf(
        tmp_path / "a.gguf", load_model(models / "hf", **LOAD), load_tokenizer(models / "hf"), end_of_turn=7
    )
    assert end_tokens(load_model(file, **LOAD)) == [1, 7]


def test_a_file_of_the_same_name_in_the_working_directory_is_not_read(models, alone, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "one.gguf").write_text("nothing")
    monkeypatch.chdir(tmp_path / "here")
    assert load_model(alone, **LOAD).config.hidden_size == 32


@pytest.mark.parametrize("form", ["directory", "directory and gguf_file"])
def test_a_directory_with_one_file_is_a_model(models, alone, tmp_path, form):
    ids = load_tokenizer(alone)(PROMPT, return_tensors="pt").input_ids
    expected = PromptLookup.from_pretrained(alone).generate(ids, max_new_tokens=NEW)
    more = {"gguf_file": "one.gguf"} if form != "directory" else {}
    if more:
        shutil.copy(alone, tmp_path / "two.gguf")
    engine = DraftTarget.from_pretrained(tmp_path, alone.parent, **more, draft_model_kwargs=more)
    assert torch.equal(engine.generate(ids, max_new_tokens=NEW), expected)


def test_gguf_file_is_for_a_model_by_name_and_names_a_gguf_file(models):
    with pytest.raises(ArgumentError, match="leave gguf_file out"):
        PromptLookup.from_pretrained(load_model(models / "hf", **LOAD), gguf_file="a.gguf")
    with pytest.raises(ArgumentError, match=r"must name a \.gguf file, got 'a.bin'"):
        PromptLookup.from_pretrained(models, gguf_file="a.bin")
    with pytest.raises(CheckpointError, match=r"absent\.gguf does not exist"):
        ReDrafter.from_pretrained(models, models / "drafter", gguf_file="absent.gguf")


def test_commands_take_a_gguf_file(models, capsys):
    file, drafter = str(models / "file.gguf"), str(models / "drafter")
    out = printed("generate", "--model", file, "--drafter", drafter, "--compare", "--json", PROMPT)
    assert (out["model"], out["compare"][1]["same"]) == (file, 1)
    assert out["dtype"] == ("float32" if is_fast("cpu") else "bfloat16")
    code, _, err = ran("generate", "--model", file, "--draft-model", file, "--max-new-tokens", "4", PROMPT)
    assert code == 0, err
    assert "GGUF tensors" not in err  # a progress bar of transformers
    assert f"type redrafter generate --model {file}" in fails(capsys, "generate", file, PROMPT)
    code, _, err = ran("generate", "--model", file, "--max-new-tokens", "4", PROMPT)
    assert (code, "holds no drafter, so tokens are recycled" in err) == (0, True), err
    assert "a smaller model drafts with --draft-model" in fails(
        capsys, "generate", "--model", str(models / "hf"), "--drafter", file, PROMPT
    )


def test_a_drafter_is_trained_for_a_gguf_file(models, tmp_path):
    file, data, output = str(models / "file.gguf"), tmp_path / "rows.jsonl", str(tmp_path / "drafter")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:8]))
    options = ["--model", file, "--data", str(data), "--cpu", "--length", "32", "--batch-size", "2"]
    code, _, err = ran("train", *options, "--steps", "2", "--output", output, "--validate-prompts", "0")
    assert code == 0, err
    document = printed("info", file, "--drafter", output, "--json")
    assert document["fits"] is True
    assert document["drafter"]["base_model"].endswith("file.gguf")


def test_info_describes_a_gguf_file_and_a_drafter_for_it(models):
    document = printed("info", str(models / "file.gguf"), "--drafter", str(models / "drafter"), "--json")
    model, stock = document["model"], load_model(models / "hf", **LOAD)
    assert (document["kind"], document["fits"]) == ("model", True)
    assert model["parameters"] == sum(parameter.numel() for parameter in stock.parameters())
    assert (model["stored_as"], model["layers"], model["vocabulary"]) == ("Q8_0, F32", 2, 300)
    assert model["loaded_as"] == "float32 on a CPU, else bfloat16, unless --dtype names another format"
    assert model["target"].startswith("yes")
    assert document["converts_to"]["redrafter"] == "yes"
    assert "quantised" in document["converts_to"]["trtllm"]


def test_convert_merges_a_gguf_file_with_its_drafter(models, tmp_path):
    base, drafter, output = str(models / "file.gguf"), str(models / "drafter"), tmp_path / "merged"
    words = ["--base-model-checkpoint-dir", base, "--drafter-model-dir", drafter, "--output-dir", str(output)]
    assert ran("convert", *words)[0] == 0
    assert sorted(entry.name for entry in output.iterdir()) == ["drafter", "file.gguf", "redrafter.json"]
    engine = ReDrafter.from_pretrained(output)
    ids = load_tokenizer(output)(PROMPT, return_tensors="pt").input_ids
    whole = ReDrafter.from_pretrained(base, drafter).generate(ids, max_new_tokens=NEW)
    assert torch.equal(engine.generate(ids, max_new_tokens=NEW), whole)
    assert printed("info", str(output), "--json")["kind"] == "merged checkpoint"
    assert ran("convert", *words, "--overwrite")[0] == 0


def test_a_directory_with_several_files_is_refused_with_their_names(alone, tmp_path, capsys):
    shutil.copy(alone, tmp_path / "two.gguf")
    line = fails(capsys, "generate", "--model", str(tmp_path), "--prompt-lookup", PROMPT)
    assert f"holds several GGUF files, one.gguf, two.gguf: give one of them, such as {alone}" in line


@pytest.mark.parametrize("command", ["generate", "info"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-64], "is not a whole GGUF file"),
        (lambda data: data[:3000], "is not a whole GGUF file"),
        (lambda data: data[:20], "is not a whole GGUF file"),
        (lambda data: b"", "is not a whole GGUF file"),
        (lambda data: b"PK" + data, "is not a whole GGUF file (GGUF magic invalid)"),
    ],
)
def test_a_file_that_is_cut_short_or_something_else_is_refused_on_one_line(alone, capsys, command, content, message):
    alone.write_bytes(content(alone.read_bytes()))
    words = ["--model", str(alone), "--prompt-lookup", PROMPT] if command == "generate" else [str(alone)]
    assert message in fails(capsys, command, *words)


def test_an_architecture_that_transformers_does_not_read_is_refused_by_name(models, tmp_path, capsys):
    model = load_model(models / "hf", **LOAD)
    file = write_gguf(tmp_path / "a.gguf", model, load_tokenizer(models / "hf"), architecture="plamo")
    for words in (["generate", "--model", str(file), "--prompt-lookup", PROMPT], ["info", str(file)]):
        assert "is a plamo model, an architecture that transformers does not read" in fails(capsys, *words)
    with pytest.raises(CheckpointError, match="is a plamo model"):
        load_model(file, **LOAD)


def test_a_missing_package_is_named_with_what_to_type(models, monkeypatch):
    monkeypatch.setattr("redrafter.files.gguf_file.find_spec", lambda name: None)
    for load in (load_tokenizer, load_config, lambda file: load_model(file, **LOAD)):
        with pytest.raises(MissingDependencyError, match=r"package gguf, .*pip install '\.\[gguf\]'"):
            load(models / "file.gguf")


def test_a_gguf_file_is_not_split(models):
    with pytest.raises(
        UnsupportedError, match="GGUF file and tensor parallelism exclude each other: the file is read whole"
    ):
        load_model(models / "file.gguf", tp_size=2, **LOAD | {"device": None})


@pytest.fixture(scope="module")
def split(models, tmp_path_factory):
    """A folder with the file in two parts, as llama-gguf-split writes them: all metadata are in the first."""
    folder = tmp_path_factory.mktemp("split")
    split_gguf(models / "file.gguf", folder, parts=2)
    return folder


@pytest.mark.parametrize("name", ["", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
def test_a_split_model_is_read_from_all_its_parts_by_any_of_their_names(models, split, name):
    stock, model = load_model(models / "file.gguf", **LOAD).state_dict(), load_model(split / name, **LOAD)
    assert all(torch.equal(weight, stock[key]) for key, weight in model.state_dict().items())
    assert load_tokenizer(split / name).get_vocab() == load_tokenizer(models / "file.gguf").get_vocab()


def test_a_split_model_is_described_and_merged_whole(models, split, tmp_path):
    part, output = str(split / "m-00001-of-00002.gguf"), tmp_path / "merged"
    whole = printed("info", str(models / "file.gguf"), "--json")["model"]
    found = printed("info", part, "--json")["model"]
    assert {"parameters", "stored_as", "target"} <= found.keys()
    assert all(found[key] == whole[key] for key in ("parameters", "stored_as", "target"))
    words = ["--drafter-model-dir", str(models / "drafter"), "--output-dir", str(output)]
    assert ran("convert", "--base-model-checkpoint-dir", part, *words)[0] == 0
    ids = load_tokenizer(output)(PROMPT, return_tensors="pt").input_ids
    expected = ReDrafter.from_pretrained(models / "file.gguf", models / "drafter").generate(ids, max_new_tokens=NEW)
    assert torch.equal(ReDrafter.from_pretrained(output).generate(ids, max_new_tokens=NEW), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "m-00002-of-00002.gguf").unlink(), r"m-00002-of-00002\.gguf does not exist: .*split"),
        (lambda folder: (folder / "m-00002-of-00002.gguf").rename(folder / "a.gguf"), "does not exist"),
        (
            lambda folder: shutil.copy(folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"),
            "not a whole model: 2 of",
        ),
        (lambda folder: rename_part(folder), r"1 of split\.count = 2 .*llama-gguf-split --merge"),
    ],
    ids=["missing", "renamed", "twice", "first alone"],
)
def test_parts_that_are_no_whole_model_are_refused_on_one_line(split, tmp_path, capsys, change, message):
    folder = Path(shutil.copytree(split, tmp_path / "parts"))
    change(folder)
    file = str(next(iter(sorted(folder.glob("*.gguf"), reverse=True))))
    for words in (["generate", "--model", file, "--prompt-lookup", PROMPT], ["info", file]):
        assert re.search(message, fails(capsys, *words))


def rename_part(folder):
    """Leave the first part alone, by a name that is no part's."""
    (folder / "m-00001-of-00002.gguf").rename(folder / "m.gguf")
    (folder / "m-00002-of-00002.gguf").unlink()


def test_a_split_model_that_transformers_reads_from_one_file_is_refused_with_what_to_type(split, monkeypatch):
    monkeypatch.setattr("transformers.integrations.gguf.GGUF_CONFIG_ARCHS", {"llama": None})
    with pytest.raises(UnsupportedError, match=r"split\.count.* reads llama models from one: llama-gguf-split --merge"):
        load_model(split / "m-00002-of-00002.gguf", **LOAD)


def test_metadata_are_read_as_by_the_reader_of_gguf(models, monkeypatch):
    file = models / "file.gguf"
    with reading(file):
        of_model = load_gguf_checkpoint(str(file))
    theirs = load_gguf_checkpoint(str(file))
    assert of_model["config"] == theirs["config"]
    assert not any(of_model["tokenizer"]["tokens"])  # decoding each took 0.7 s, three times
    with reading(file, texts=True) as (source, gguf_file):
        read = AutoTokenizer.from_pretrained(source, **gguf_file)
    stock = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert read.backend_tokenizer.to_str() == stock.backend_tokenizer.to_str()
    # Which takes 15 s for 152,000 tokens, each time.
    monkeypatch.setattr(gguf.GGUFReader, "__init__", None)
    load_tokenizer(file)
    load_model(file, **LOAD)


def test_tensors_are_ordinary_arrays_dequantised_bit_by_bit_as_by_the_reader_of_gguf(models):
    file = str(models / "file.gguf")
    with reading(file):
        ours = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for theirs in gguf.GGUFReader(file).tensors:
        tensor = ours[theirs.name]
        assert type(tensor.data) is numpy.ndarray  # slices of a memmap take twice the time
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert numpy.array_equal(numbers, gguf.dequantize(theirs.data, theirs.tensor_type))
    assert len(ours) > 10


def test_a_drafter_of_another_size_is_refused_before_weights_are_read(models, tmp_path, monkeypatch):
    torch.manual_seed(0)
    RecurrentDrafter(DrafterConfig(vocab_size=300, hidden_size=16)).save_pretrained(tmp_path / "small")
    monkeypatch.setattr("redrafter.checkpoints.models.load_model", None)
    file = models / "file.gguf"
    with pytest.raises(MismatchError, match="made for a hidden size of 16, but"):
        ReDrafter.from_pretrained(file, tmp_path / "small")
    with pytest.raises(CheckpointError, match="no config"):
        ReDrafter.from_pretrained(file, tmp_path)


def test_a_version_of_the_format_that_is_not_read_is_named(alone, capsys):
    content = alone.read_bytes()
    alone.write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    assert "version 1 " in fails(capsys, "info", str(alone))
