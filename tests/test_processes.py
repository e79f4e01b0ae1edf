"""Several processes train one drafter: the same as one process would, whether each holds the base or they share it."""

import json
import socket
from pathlib import Path

import pytest
import torch
from apart import start
from test_train import command

from redrafter import RecurrentDrafter
from redrafter.train.train_drafter import main

STEPS = ["--steps", "7", "--batch-size", "2", "--no-pack", "--validate-every", "3", "--save-every", "4", "--lr", "0.01"]


def together(folder: Path, *more: str) -> str:
    """Train with two processes, started as torchrun starts them. Returns what they said."""
    arguments = ["train", *command(folder, *STEPS, *more)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    said = [folder / f"said.{rank}" for rank in (0, 1)]
    started = [
        start(arguments, said[rank], RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, **meeting)
        for rank in (0, 1)
    ]
    for process in started:
        process.join()
    lines = "".join(file.read_text() for file in said)
    assert [process.exitcode for process in started] == [0, 0], lines
    return lines


def found(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    drafter = RecurrentDrafter.from_pretrained(folder / "out")
    return drafter.state_dict(), json.loads((folder / "out" / "training.json").read_text())


def close(one: Path, other: Path, tolerance: float) -> None:
    (mine, said), (its, told) = found(one), found(other)
    for name, weight in mine.items():
        torch.testing.assert_close(its[name], weight, rtol=0, atol=tolerance)
    for name in ("steps", "tokens", "tokens_per_step", "saved_step", "data_hash"):
        assert said[name] == told[name], name
    assert said["loss"] == pytest.approx(told["loss"], rel=1e-5)
    assert said["accuracy"] == pytest.approx(told["accuracy"])


def test_two_processes_are_one_that_accumulates_whoever_holds_the_base(tmp_path):
    places = {name: tmp_path / name for name in ("one", "two", "shared")}
    for place in places.values():
        place.mkdir()
    assert main(command(places["one"], *STEPS, "--accumulate", "2")) == 0
    assert together(places["two"]).count("saved ") == 1
    together(places["shared"], "--shard-base")
    assert found(places["two"])[1]["processes"] == 2
    close(places["one"], places["two"], 1e-5)
    close(places["two"], places["shared"], 1e-5)


def test_a_base_is_not_shared_by_one_process(tmp_path, capsys):
    assert main(command(tmp_path, "--shard-base")) == 2
    assert "--shard-base is for several processes: start them with accelerate launch" in capsys.readouterr().err
