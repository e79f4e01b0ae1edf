"""Commands that torchrun has started on several ranks: what they print, and an end of all ranks within seconds."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.command_line import byte_tokenizer
from helpers.models import tiny_model
from helpers.processes import children, soon
from helpers.ranks import SHARED, VOCAB, environment, launch, run_on_ranks
from redrafter.cli import main

pytestmark = pytest.mark.slow
END_SECONDS = 300.0  # in which all ranks have ended after one was killed


def run(ranks: int, *words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return run_on_ranks(ranks, "redrafter", *words, module=True, stdin=stdin)


def test_generate_prints_once_what_one_process_prints(folder, capsys):
    words = ["generate", "--model", str(folder / "merged"), "--max-new-tokens", "20", "--seed", "3", "ja", "9 €"]
    on_ranks = run(2, *words, "--temperature", "1")
    assert main([*words, "--temperature", "1"]) == 0
    assert on_ranks.stdout == capsys.readouterr().out


@pytest.mark.parametrize("file", [[], ["--file", "/dev/stdin"]])
def test_a_draft_model_and_a_prompt_from_stdin(folder, file):
    words = [
        "--draft-model",
        folder / "small",
        "--draft-target-model-config",
        "[4,[0],[0,1],False]",
        "--compare",
        *file,
    ]
    document = json.loads(run(2, "generate", "--json", "--model", folder / "base", *words, stdin="Zürich").stdout)
    assert document["prompts"] == ["Zürich"]
    assert document["compare"][1]["same"] == 1


def test_bench_measures_and_writes_once(folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("ja\nZürich\n")
    words = ["--model", folder / "merged", "--max-new-tokens", "8", "--num-prompts", "2", "--batch-sizes", "1,2"]
    ended = run(2, "bench", *words, "--prompts", tmp_path / "prompts.txt", "--json", tmp_path / "bench.json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["processes"] == 2
    assert all(batch["equality"]["equal"] for batch in document["batches"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--prompt-lookup", "ja", "--model"], "take 1, 2 or 4"),
        (["generate", "--device", "cpu", "ja", "--model"], "--device cpu: torchrun assigns a device"),
        (["chat", "--model"], "share a model in generate, serve, bench alone"),
    ],
)
def test_a_command_on_ranks_says_one_line(tmp_path, words, said):
    tiny_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path)  # 4 heads, 2 key-value heads
    byte_tokenizer().save_pretrained(tmp_path)
    ended = run(3, *words, tmp_path)
    assert ended.returncode != 0
    assert ended.stdout == ""
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("redrafter:")]
    assert said in line
    assert re.search(r"exitcode +: 2 ", ended.stderr)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(tmp_path, rank):
    tiny_model("llama", **SHARED).save_pretrained(tmp_path / "llama")
    command = launch(2, "helpers.endless_ranks", tmp_path / "llama", tmp_path / "started", module=True)
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    try:
        assert soon(lambda: len(list(tmp_path.glob("started*"))) == 2)
        ranks = {int(path.read_text()): path for path in tmp_path.glob("started*")}
        victim = next(pid for pid, path in ranks.items() if path.name.endswith(str(rank)))
        os.kill(victim, signal.SIGKILL)
        process.communicate(timeout=END_SECONDS)
        assert process.returncode != 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
