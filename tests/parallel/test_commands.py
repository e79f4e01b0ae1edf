"""Commands that torchrun has started on two ranks."""

import json

import pytest

from helpers.ranks import run_on_ranks

pytestmark = pytest.mark.slow


def test_generate_prints_once_what_one_process_prints(folder, capsys):
    from redrafter.cli import main

    words = ["generate", "--model", str(folder / "merged"), "--max-new-tokens", "20", "--seed", "3", "ja", "9 €"]
    run = run_on_ranks(2, "redrafter", *words, "--temperature", "1", module=True)
    assert main([*words, "--temperature", "1"]) == 0
    assert run.stdout == capsys.readouterr().out


def test_a_draft_model_and_a_prompt_from_stdin(folder):
    words = ["--draft-model", folder / "small", "--draft-target-model-config", "[4,[0],[0,1],False]", "--compare"]
    run = run_on_ranks(
        2, "redrafter", "generate", "--json", "--model", folder / "base", *words, module=True, stdin="Zürich"
    )
    document = json.loads(run.stdout)
    assert document["prompts"] == ["Zürich"]
    assert document["compare"]["equal"]


def test_bench_measures_and_writes_once(folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("ja\nZürich\n")
    words = ["--model", folder / "merged", "--max-new-tokens", "8", "--num-prompts", "2", "--batch-sizes", "1,2"]
    out = ["--prompts", tmp_path / "prompts.txt", "--json", tmp_path / "bench.json"]
    run = run_on_ranks(2, "redrafter", "bench", *words, *out, module=True)
    assert run.returncode == 0, run.stderr[-2000:]
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["processes"] == 2
    assert all(batch["equality"]["equal"] for batch in document["batches"])
