"""Commands on several ranks, by torchrun or by the command: what they print, and that all end within seconds."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
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


def started_here(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command that starts two ranks itself."""
    command = [sys.executable, "-m", "redrafter", *map(str, words), "--tensor-parallel-size", "2"]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, input=stdin)


@pytest.mark.parametrize("mode", [[], ["--no-speculate"]])
def test_a_command_starts_its_own_ranks_which_write_the_tokens_of_one_process(folder, capsys, mode):
    words = ["generate", "--model", str(folder / "merged"), "--max-new-tokens", "20", "--seed", "3", *mode]
    ended = started_here(*words, "--temperature", "1", stdin="9 €")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert main([*words, "--temperature", "1", "9 €"]) == 0
    assert ended.stdout == capsys.readouterr().out
    [line] = ended.stderr.splitlines()
    assert "tokens/s" in line


def test_an_error_of_ranks_is_one_line_and_its_exit_code(tmp_path):
    tiny_model("llama", vocab_size=VOCAB, hidden_size=48, num_attention_heads=3, num_key_value_heads=3).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save_pretrained(tmp_path)
    ended = started_here("generate", "--prompt-lookup", "ja", "--model", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("redrafter: error: tp_size=2 does not divide")


@pytest.mark.parametrize(
    ("sent", "to_rank", "code", "said"),
    [
        (signal.SIGINT, None, 130, "\nredrafter: stopped\n"),
        (signal.SIGTERM, None, 143, ""),
        (signal.SIGKILL, 1, 137, "redrafter: error: the process of rank 1 was ended by SIGKILL\n"),
    ],
)
def test_signals_end_all_ranks_that_a_command_started(folder, sent, to_rank, code, said):
    words = ["--model", folder / "merged", "--max-new-tokens", "150", "--num-return-sequences", "400", "ja"]
    command = [sys.executable, "-m", "redrafter", "generate", "--tensor-parallel-size", "2", *map(str, words)]
    options = ["--temperature", "1", "--stop-token-ids", "1"]
    process = subprocess.Popen(
        [*command, *options], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.read(1)  # it writes
        ranks = sorted(children(process.pid))
        os.kill(process.pid if to_rank is None else ranks[to_rank], sent)
        _, err = process.communicate(timeout=END_SECONDS)
        assert process.returncode == code
        assert err == said or (to_rank and err.endswith(said))  # the others may notice it first
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("file", [[], ["--file", "/dev/stdin"]])
def test_a_draft_model_and_a_prompt_from_stdin(folder, file):
    words = ["--draft-model", folder / "small", "--compare", *file]
    document = json.loads(run(2, "generate", "--json", "--model", folder / "base", *words, stdin="Zürich").stdout)
    assert document["prompts"] == ["Zürich"]
    assert document["compare"][1]["same"] == 1


@pytest.mark.parametrize("start", [partial(run, 2), started_here], ids=["torchrun", "here"])
def test_bench_measures_and_writes_once(folder, tmp_path, start):
    (tmp_path / "prompts.txt").write_text("ja\nZürich\n")
    words = ["--model", folder / "merged", "--max-new-tokens", "8", "--num-prompts", "2", "--batch-sizes", "1,2"]
    ended = start("bench", *words, "--prompts", tmp_path / "prompts.txt", "--json", tmp_path / "bench.json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "bench.json").read_text().splitlines()]
    assert [(record["mode"], record["batch_size"]) for record in records] == [
        (mode, rows) for rows in (1, 2) for mode in ("undrafted", "drafter")
    ]
    assert all(record["same"] == record["texts"] for record in records if record["mode"] == "drafter")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--prompt-lookup", "ja", "--model"], "take 1, 2 or 4"),
        (
            ["generate", "--device", "cpu", "ja", "--model"],
            "--device cpu: each of several processes has a device of its own",
        ),
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


def test_ranks_that_wait_for_each_other_end_with_their_launcher(folder):
    """Rank 0 waits for a prompt on stdin before it loads, and rank 1 for rank 0."""
    words = launch(2, "redrafter", "generate", "--model", folder / "merged", module=True)
    process = subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = list[psutil.Process]()
    try:
        assert soon(lambda: len(children(process.pid)) == 2)
        ranks = [psutil.Process(pid) for pid in children(process.pid)]
        assert soon(lambda: all(rank.num_threads() > 2 for rank in ranks))  # they watch, and have opened connections
        process.kill()
        assert soon(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
        assert process.stderr is not None
        lines = [line for line in process.stderr if line.startswith("redrafter: ")]
        assert lines == ["redrafter: error: the process that started this one has ended\n"]
    finally:
        for rank in (rank for rank in ranks if rank.is_running()):
            rank.kill()
        process.kill()
        process.communicate()


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
