"""`--tensor-parallel-size` is refused by name where the ranks cannot be started; tests/parallel starts them."""

import pytest
import torch

from redrafter.cli import main


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr."""
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("words", [["generate", "ja"], ["bench"], ["serve", "--port", "0"]])
@pytest.mark.parametrize("size", ["0", "-1"])
def test_each_command_takes_one_rank_or_more(capsys, words, size):
    assert main([*words, "--tensor-parallel-size", size]) == 2
    assert said(capsys) == f"redrafter: error: tensor_parallel_size must be a positive integer, got {size}"


@pytest.mark.parametrize("command", ["chat", "compare", "evaluate"])
def test_commands_of_one_process_have_no_such_flag(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--tensor-parallel-size", "2"])
    assert "unrecognized arguments: --tensor-parallel-size" in said(capsys)


def test_more_ranks_than_gpus_are_refused_before_any_starts(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["generate", "--tensor-parallel-size", "3", "ja"]) == 2
    assert "--tensor-parallel-size 3: each rank needs a GPU, and this machine has 2: start 2 at most" in said(capsys)


@pytest.mark.parametrize("started", ["1", "4"])
def test_ranks_that_torchrun_has_started_start_no_others(capsys, monkeypatch, started):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": started}.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "--tensor-parallel-size", "2", "ja"]) == 2
    assert f"--tensor-parallel-size 2 starts ranks itself, and torchrun has started {started}" in said(capsys)
