"""Every example runs as a reader would run it."""

import ast
import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import redrafter
from helpers.models import tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "own_model.py": "tokens per step",
    "draft_target.py": "the same tokens",
    "chat.py": "> And of `grep`?",
    "streaming.py": "[",
    "custom_generate.py": "committee",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_example_runs(script, tmp_path):
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert SCRIPTS[script] in found.stdout


def test_examples_import_public_names_alone():
    for script in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("server/*.py")):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("redrafter.") for alias in node.names), script
            elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "redrafter":
                assert node.module == "redrafter", script
                assert {alias.name for alias in node.names} <= {*redrafter.__all__}, script


@pytest.mark.parametrize(
    "script", [*EXAMPLES.glob("server/*.py"), *EXAMPLES.glob("lora/*.py")], ids=lambda path: path.name
)
def test_an_example_that_needs_arguments_says_so(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 2
    assert "error: the following arguments are required" in capsys.readouterr().err


def test_no_example_is_left_out():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "vllm_proposer.py"}


@pytest.mark.slow
def test_the_recipe_of_the_boxed_pair_runs(tmp_path):
    """On this project's own pages, in the sizes that are there to try it out."""
    root = EXAMPLES.parent
    pages = [page.read_text(encoding="utf-8") for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))]
    parts = [page[at : at + 3000] for page in pages for at in range(0, len(page) - 3000, 3000)]
    talk = [{"role": "user", "content": "What is a node?"}, {"role": "assistant", "content": parts[0][:400]}]
    rows = [
        {"source": "pages", "split": "val" if n % 8 == 0 else "train", "text": part} for n, part in enumerate(parts)
    ]
    rows += [{"source": "talks", "split": split, "conversations": talk} for split in ("train", "val")]
    rows = [{"id": str(n)} | row for n, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [EXAMPLES / "tiny_pair" / "run.py", "--tiny", "--data", "data.jsonl", "--out", "out", "--device", "cpu"]
    found = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "lattice, coupled" in found.stdout
    assert (tmp_path / "out" / "pair" / "model.safetensors").is_file()


@pytest.fixture
def writer(monkeypatch):
    """The recipe's module of that name, which its stages import as they are run: from their own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "tiny_pair"))
    return importlib.import_module("writer")


def test_the_writer_continues_rows_of_unequal_prompts_as_generate_does(writer, monkeypatch):
    monkeypatch.setattr(writer, "SPAN", 8)  # so that these texts cross from one span into the next
    model = tiny_model("llama")
    prompts = torch.randint(3, model.config.vocab_size, (3, 6))
    lengths = torch.tensor([2, 4, 6])
    written = writer.Writer(model, 3, 20).write(prompts, lengths, torch.zeros(3))
    for row, length in enumerate(lengths.tolist()):
        start = prompts[row : row + 1, :length]
        expected = model.generate(start, max_length=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert written[row].tolist() == expected[0].tolist()
