"""A process that ends takes those that train with it along, at once and with one message."""

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from helpers.apart import start_together
from helpers.training import command
from redrafter import RecurrentDrafter
from redrafter.train.checkpoints import Checkpoint

ENDLESS = ["--steps", "100000", "--batch-size", "2", "--save-every", "5", "--keep", "1", "--validate-prompts", "0"]
SECONDS = 300  # a machine may be busy; alone it takes less than one


def codes_of(processes: list[BaseProcess]) -> list[int | None]:
    """Wait for processes to end. Returns their exit codes, None for one that goes on."""
    until = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def errors(folder: Path, count: int) -> list[str]:
    said = "".join((folder / f"said.{rank}").read_text() for rank in range(count))
    assert "Traceback" not in said, said
    return [line for line in said.splitlines() if line.startswith("redrafter: error")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_that_is_killed_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path, killed):
    processes = start_together([["train", *command(tmp_path, *ENDLESS)]] * 3, tmp_path)
    checkpoints = tmp_path / "out.checkpoints"
    while not list(checkpoints.glob("step-*")) and all(process.is_alive() for process in processes):
        time.sleep(0.05)
    processes[killed].kill()
    assert codes_of(processes) == [-9 if rank == killed else 2 for rank in range(3)]
    assert errors(tmp_path, 3) == [
        f"redrafter: error: process {killed} of 3 (from 0) has ended before the training was done; start all of them "
        "again, with --resume where there are checkpoints"
    ]
    newest = max(checkpoints.glob("step-*"))
    assert Checkpoint.read(newest).load_optimizer()
    assert RecurrentDrafter.from_pretrained(newest)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_alone_says_why_and_the_others_say_nothing(tmp_path, failing):
    commands = [["train", *command(tmp_path, *ENDLESS)] for _ in range(3)]
    commands[failing][commands[failing].index("--data") + 1] = str(tmp_path / "nowhere.jsonl")
    assert codes_of(start_together(commands, tmp_path)) == [2, 2, 2]
    (error,) = errors(tmp_path, 3)
    assert "nowhere.jsonl cannot be read" in error
