"""Errors of programs on several ranks: one line, and an end of all ranks within seconds."""

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
from redrafter import ArgumentError, PromptLookup, UnsupportedError
from redrafter.checkpoints.models import check_loaded_size, check_splits, split_device

END_SECONDS = 300.0  # in which all ranks have ended after one was killed


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama", vocab_size=VOCAB).save_pretrained(path)  # 4 heads, 2 key-value heads
    byte_tokenizer().save_pretrained(path)
    return path


def lines_of_ours(run: subprocess.CompletedProcess) -> list[str]:
    return [line for line in run.stderr.splitlines() if line.startswith("redrafter:")]


def test_one_process_says_how_to_start_more(model):
    with pytest.raises(ArgumentError, match="torchrun --nproc-per-node 2"):
        PromptLookup.from_pretrained(model, tp_size=2)


@pytest.mark.parametrize("tp_size", [3, 4])
def test_the_sizes_that_divide_the_heads_are_named(model, tp_size):
    with pytest.raises(ArgumentError, match=f"tp_size={tp_size} does not divide .* take 1 or 2"):
        check_splits(str(model), tp_size, False, {})


def test_a_single_key_value_head_cannot_be_split(tmp_path):
    tiny_model("llama", num_key_value_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="one key-value head"):
        check_splits(str(tmp_path), 2, False, {})


@pytest.mark.parametrize("tp_size", [0, -1, True, 2.0])
def test_a_size_is_a_positive_integer(model, tp_size):
    with pytest.raises(ArgumentError, match="positive integer"):
        check_splits(str(model), tp_size, False, {})


def test_a_model_without_a_plan_is_refused(tmp_path):
    config = tiny_model("gpt_neox").config
    config.base_model_tp_plan = None
    with pytest.raises(UnsupportedError, match="no tensor-parallel plan"):
        check_splits(str(tmp_path), 2, False, {"config": config})


def test_a_quantised_model_is_refused(model):
    config = tiny_model("llama").config
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="quantised"):
        check_splits(str(model), 2, False, {"config": config})


@pytest.mark.parametrize("scheme", ["fp8", "fp8_dynamic"])
def test_a_model_is_not_quantised_in_parts(model, scheme):
    with pytest.raises(UnsupportedError, match="quantised"):
        PromptLookup.from_pretrained(model, tp_size=2, quantization=scheme)


def test_a_loaded_model_cannot_be_split_any_more(llama):
    with pytest.raises(ArgumentError, match="loaded already, whole"):
        check_loaded_size(llama, 2)


def test_no_rank_chooses_its_device():
    with pytest.raises(ArgumentError, match="a device of its own"):
        split_device("cuda:3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--prompt-lookup", "ja", "--model"], "take 1 or 2"),
        (["generate", "--device", "cpu", "ja", "--model"], "--device cpu: torchrun gives each process a device"),
        (["chat", "--model"], "share a model in generate, serve, bench alone"),
    ],
)
def test_a_command_on_ranks_says_one_line(model, words, said):
    run = run_on_ranks(3, "redrafter", *words, model, module=True, seconds=300)
    assert run.returncode != 0
    assert run.stdout == ""
    [line] = lines_of_ours(run)
    assert said in line
    assert re.search(r"exitcode +: 2 ", run.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(tmp_path, rank):
    tiny_model("llama", **SHARED).save_pretrained(tmp_path / "llama")
    started = tmp_path / "started"
    process = subprocess.Popen(
        launch(2, "helpers.endless_ranks", tmp_path / "llama", started, module=True),
        env=environment(),
        stderr=subprocess.PIPE,
    )
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


def test_a_drafter_is_never_split(model):
    with pytest.raises(ArgumentError, match="leave out drafter_tp_size"):
        PromptLookup.from_pretrained(model, drafter_tp_size=2)
