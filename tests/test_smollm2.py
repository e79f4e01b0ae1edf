"""The scripts of `make chat` and `make real`, on a tiny model in place of the one that they download."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

pytest.importorskip("gguf")

from helpers.gguf_files import make_models

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("gguf"))


def run(script: str, *words: object) -> tuple[str, str]:
    command = [sys.executable, str(EXAMPLE / script), *map(str, words)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout, found.stderr


@pytest.mark.slow
def test_the_model_is_made_once_of_its_gguf_file(models, tmp_path):
    out = tmp_path / "model"
    assert "making" in run("make.py", out, "--gguf", models / "file.gguf")[1]
    made, stock = (load_file(folder / "model.safetensors") for folder in (out, models / "hf"))
    assert all(torch.equal(weight, stock[name].bfloat16()) for name, weight in made.items())
    config = GenerationConfig.from_pretrained(out)
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.2, 0.9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]
    assert run("make.py", out, "--gguf", "absent.gguf")[1] == f"{out} is there already\n"


@pytest.mark.slow
def test_every_engine_is_compared_with_generate(models):
    words = ["--draft-model", models / "file.gguf", "--count", 2, "--max-new-tokens", 8, "--device", "cpu"]
    out, _ = run("real.py", "--model", models / "hf", "--drafter", models / "drafter", *words)
    for name in ("undrafted", "ReDrafter", "DraftTarget", "PromptLookup"):
        assert f"{name}, float32: 2 of 2 answers equal to model.generate" in out
        assert name == "undrafted" or f"{name}, bfloat16: 2 of 2 answers equal to undrafted decoding" in out
