"""`redrafter generate --image`."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from helpers.chats_with_images import llava_with_processor, picture
from helpers.command_line import fails
from helpers.models import tiny_model
from redrafter.checkpoints import tokenizers
from redrafter.checkpoints.tokenizers import load_processor
from redrafter.cli import main
from redrafter.errors import CheckpointError, MissingDependencyError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model that sees, `seeing`, and two images."""
    folder = tmp_path_factory.mktemp("images")
    model, processor = llava_with_processor()
    model.save_pretrained(folder / "seeing")
    processor.save_pretrained(folder / "seeing")
    for name in ("first", "second"):
        picture(len(name)).save(folder / f"{name}.png")
    return folder


def words(folder: Path, *more: str) -> list[str]:
    return ["generate", "--model", str(folder / "seeing"), "--prompt-lookup", "--chat", *more]


def test_images_from_files_are_shown_before_the_prompt(folder, capsys):
    files = [word for name in ("first", "second") for word in ("--image", str(folder / f"{name}.png"))]
    assert main(words(folder, *files, "--json", "--compare", "--max-new-tokens", "12", "what?")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compare"][1]["same"] == 1
    model, processor = llava_with_processor()
    images = [picture(len(name)) for name in ("first", "second")]
    inputs = processor(
        text=["<|user|><image><image>what?<|assistant|>"], images=images, return_tensors="pt", add_special_tokens=False
    )
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found["texts"] == [processor.tokenizer.decode(expected, skip_special_tokens=True)]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--image", "none.png", "what?"], "--image none.png cannot be read: .*No such file"),
        (["--image", __file__, "what?", "and?"], "give one prompt"),
    ],
)
def test_what_cannot_be_shown_is_refused(folder, capsys, more, says):
    assert re.search(says, fails(capsys, *words(folder, *more)))


def test_a_model_of_text_is_shown_nothing(folder, tmp_path, capsys):
    _, processor = llava_with_processor()
    tiny_model("llama", vocab_size=len(processor.tokenizer)).save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    line = ["generate", "--model", str(tmp_path), "--prompt-lookup", "--chat"]
    assert "takes no images" in fails(capsys, *line, "--image", str(folder / "first.png"), "what?")
    with pytest.raises(CheckpointError, match="processor"):
        load_processor(tmp_path)


def test_it_is_said_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[vision\]' in a checkout"):
        load_processor(folder / "seeing")
