"""Arguments of the wrong kind: directories of another kind, missing paths, unknown keywords."""

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.command_line import CONTEXT, fails
from helpers.models import tiny_drafter, tiny_model
from redrafter import ArgumentError, CheckpointError, DraftTarget, PromptLookup, RecurrentDrafter, ReDrafter
from redrafter.cli import main
from redrafter.convert.convert_checkpoint import main as convert
from redrafter.errors import first_line
from redrafter.files.checkpoint_kind import kind_of


@pytest.fixture(scope="module")
def kinds(folder, tmp_path_factory) -> Path:
    """Return a folder with a pair in every format: links to those of the fixture `folder`, and converted ones."""
    place = tmp_path_factory.mktemp("kinds")
    for name in ("base", "merged", "drafter", "small"):
        (place / name).symlink_to(folder / name)
    tiny_drafter(vocab_size=259).save_pretrained(place / "whole")  # no reduced vocabulary, which the others cannot hold
    pair = ["--model_dir", str(place / "base"), "--drafter_model_dir", str(place / "whole")]
    assert (
        convert(["--drafter_model_dir", str(place / "whole"), "--to", "apple", "--output_dir", str(place / "apple")])
        == 0
    )
    assert convert([*pair, "--to", "trtllm", "--output_dir", str(place / "trt llm")]) == 0
    said = json.loads((place / "trt llm" / "config.json").read_text())
    (place / "plain").mkdir()
    plain = {key: value for key, value in said.items() if not key.startswith("redrafter")}
    (place / "plain" / "config.json").write_text(json.dumps(plain))
    (place / "engine").mkdir()
    (place / "engine" / "config.json").write_text(json.dumps({"pretrained_config": said, "build_config": {}}))
    return place


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--drafter {apple}",
            "is Apple's drafter: convert it first: redrafter convert --drafter-model-dir {apple} --to",
        ),
        ("--drafter {trtllm}", "its drafter first: redrafter convert --drafter-model-dir '{trtllm}' --to drafter"),
        ("--drafter {base}", "{base} is a model, not a drafter: a smaller model drafts with --draft-model"),
        ("--drafter {merged}", "give it as the model alone, or {merged}/drafter"),
        ("--drafter {plain}", "is a TensorRT-LLM checkpoint, which holds no drafter"),
        ("--drafter {engine}", "is a built TensorRT engine, whose weights cannot be read"),
        ("--model {apple}", "{apple} is Apple's drafter, not a model: give the model that it drafts for"),
        ("--model {trtllm}", "redrafter convert --base-model-checkpoint-dir '{trtllm}' --tokenizer-dir BASE"),
        ("--model {plain}", "--base-model-checkpoint-dir {plain} --drafter-model-dir DRAFTER --tokenizer-dir BASE"),
        ("--model {engine}", "give the Hugging Face model it was made from"),
        (
            "--model {drafter}",
            "{drafter} is a drafter, not a model, and names no base in config.json or README.md: give",
        ),
        ("--draft-model {trtllm}", "is a TensorRT-LLM ReDrafter checkpoint: convert it first"),
        ("--model {base}/config.json", "{base}/config.json is not a directory, but a file"),
        ("--model ./gone", "./gone is not a directory: it does not exist"),
        ("--model ~/gone", "~/gone is not a directory: it does not exist"),
        ("--model gone/too", "gone/too does not exist here, and as a hub id no tokenizer can be loaded from it"),
        ("--model gone", "gone does not exist here"),
        ("--drafter gone/too", "gone/too does not exist here, and as a hub id no drafter can be loaded from it"),
        ("--draft-model gone/too", "gone/too does not exist here"),
    ],
)
def test_what_is_given_in_the_place_of_another_is_told_apart(kinds, capsys, flags, says):
    names = {name: str(kinds / name) for name in ("apple", "base", "merged", "drafter", "plain", "engine")}
    names["trtllm"] = str(kinds / "trt llm")
    flag, value = flags.split()
    model = [] if flag == "--model" else ["--model", names["base" if flag == "--drafter" else "merged"]]
    assert says.format(**names) in fails(capsys, "generate", *model, flag, value.format(**names), "ja")


def test_the_commands_that_are_named_do_what_they_say(kinds, capsys):
    for flag, name in (("--drafter", "apple"), ("--model", "trt llm")):
        other = ["--model", str(kinds / "base")] if flag == "--drafter" else []
        said = fails(capsys, "generate", *other, flag, str(kinds / name), "ja").partition("redrafter convert ")[2]
        words = shlex.split(said.replace("BASE", shlex.quote(str(kinds / "base"))))
        assert main(["convert", *words]) == 0
        output = words[words.index("--output-dir") + 1]
        assert main(["generate", *other, flag, output, "--max-new-tokens", "4", "ja"]) == 0
        capsys.readouterr()
    drafter = RecurrentDrafter.from_pretrained(kinds / "apple-drafter")
    whole = load_file(kinds / "whole" / "model.safetensors")
    assert all((value == whole[name]).all() for name, value in drafter.state_dict().items())


def test_a_built_engine_is_told_from_a_checkpoint(kinds, capsys):
    assert kind_of(kinds / "engine") == "built TensorRT engine"
    assert "is a built TensorRT engine" in fails(capsys, "info", str(kinds / "engine"))
    line = ["convert", "--base-model-checkpoint-dir", str(kinds / "engine"), "--output-dir", str(kinds / "no")]
    assert "is a built TensorRT engine" in fails(capsys, *line)


def test_a_model_without_a_tokenizer_is_told_so(kinds, capsys, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "mute")
    err = fails(capsys, "generate", "--model", str(tmp_path / "mute"), "--prompt-lookup", "ja")
    assert "mute has no tokenizer: copy the files" in err


def test_a_first_line_that_ends_in_a_colon_has_its_second():
    assert first_line(ValueError("one of:\n(1) this\n(2) that")) == "one of: (1) this"
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError("")) == "ValueError"


@pytest.mark.parametrize(
    ("kind", "keywords", "says"),
    [
        (DraftTarget, {"use_logits": True}, "no argument 'use_logits', here or in transformers"),
        (DraftTarget, {"draft_lne": 3}, "did you mean draft_len?"),
        (ReDrafter, {"num_beam": 3}, "did you mean num_beams?"),
        (PromptLookup, {"frobnicate": 3}, "no argument 'frobnicate', here or in transformers"),
        (ReDrafter, {"torch_dtype": "float32"}, "takes dtype='float32' for torch_dtype"),
        (PromptLookup, {"output_loading_info": True}, "leave out output_loading_info"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_keywords_of_nobody_are_named(kinds, kind, keywords, says, loaded):
    model = tiny_model("llama", vocab_size=259) if loaded else kinds / "base"
    others = {DraftTarget: [kinds / "small"], ReDrafter: [kinds / "drafter"], PromptLookup: []}[kind]
    if loaded:
        says = f"leave {next(iter(keywords))} out"
    with pytest.raises(ArgumentError) as error:
        kind.from_pretrained(model, *others, **keywords)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_keywords_of_the_draft_model_are_checked_and_taken(kinds):
    with pytest.raises(ArgumentError, match="no argument 'draft_lenn'"):
        DraftTarget.from_pretrained(kinds / "base", kinds / "small", draft_model_kwargs={"draft_lenn": 1})
    engine = DraftTarget.from_pretrained(
        kinds / "base", kinds / "small", draft_model_kwargs={"dtype": "float32", "attn_implementation": "eager"}
    )
    assert engine.draft_model.model.config._attn_implementation == "eager"
    assert engine.model.config._attn_implementation != "eager"


@pytest.mark.parametrize(
    "keywords",
    [
        {"attn_implementation": "eager"},
        {"token": False},
        {"max_position_embeddings": 99},
    ],
)
def test_keywords_of_transformers_reach_it(kinds, keywords):
    engine = PromptLookup.from_pretrained(kinds / "base", **keywords)
    assert engine.model.config._attn_implementation == keywords.get("attn_implementation", "sdpa")
    assert engine.target.context == keywords.get("max_position_embeddings", CONTEXT)


@pytest.mark.parametrize(("to", "length", "notes"), [("redrafter", 7, 1), ("drafter", 7, 1), ("redrafter", 5, 0)])
def test_converting_to_longer_drafts_than_were_trained_is_said(kinds, capsys, tmp_path, to, length, notes):
    pair = ["--model_dir", str(kinds / "base"), "--drafter_model_dir", str(kinds / "drafter")]
    says = "draft_len_per_beam=7 is more than the 5 steps that the drafter was trained for"
    length_flag = ["--redrafter_draft_len_per_beam", str(length)]
    assert convert([*pair, "--to", to, *length_flag, "--output_dir", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.count(says) == notes


@pytest.mark.parametrize(("asked", "told"), [("float16", 0), (None, 1)])
def test_a_number_format_that_was_asked_for_is_no_news(kinds, capsys, tmp_path, asked, told):
    drafter = RecurrentDrafter.from_pretrained(kinds / "whole").half()
    drafter.save_pretrained(tmp_path / "half")
    pair = ["--model_dir", str(kinds / "base"), "--drafter_model_dir", str(tmp_path / ("whole" if asked else "half"))]
    if asked:
        (tmp_path / "whole").symlink_to(kinds / "whole")
    dtype = ["--dtype", asked] if asked else []
    assert convert([*pair, "--to", "trtllm", *dtype, "--output_dir", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    assert err.count("the drafter goes from") == told
    assert told == 0 or "goes from float16 to float32, the base's; --dtype chooses another for both" in err


def test_a_drafter_of_another_kind_is_refused_before_the_model_is_loaded(kinds, monkeypatch):
    monkeypatch.setattr("redrafter.engine.redrafter.bind", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match="Apple's drafter"):
        ReDrafter.from_pretrained(kinds / "base", kinds / "apple")
