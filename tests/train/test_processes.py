"""Several processes train one drafter, whoever holds the base: the one of one process. They also end together."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from helpers.apart import start_together
from helpers.processes import soon
from helpers.training import command, record
from redrafter import ArgumentError, RecurrentDrafter, UnsupportedError
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.train.checkpoints import Checkpoint
from redrafter.train.config import TrainConfig
from redrafter.train.processes import SPREADING_VARIABLES, new_accelerator
from redrafter.train.train_drafter import main

STEPS = ["--steps", "7", "--batch-size", "2", "--no-pack", "--validate-every", "3", "--save-every", "4", "--lr", "0.01"]


FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def launch(
    folder: Path, arguments: list[str], processes: int = 2, **environment: object
) -> tuple[list[int | None], str]:
    """Run some processes of `redrafter train`, started as torchrun starts them.

    Returns:
        Their exit codes and their output.
    """
    started = start_together([["train", *arguments]] * processes, folder, **environment)
    for process in started:
        process.join()
    said = "".join((folder / f"said.{rank}").read_text() for rank in range(processes))
    return [process.exitcode for process in started], said


def together(folder: Path, *more: str, processes: int = 2) -> str:
    """Train with some processes. Returns their output."""
    codes, lines = launch(folder, command(folder, *STEPS, *more), processes)
    assert codes == [0] * processes, lines
    return lines


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return open_drafter_model(folder).state_dict()


def close(one: Path, other: Path) -> None:
    its, said, told = weights(other / "out"), record(one), record(other)
    for name, weight in weights(one / "out").items():
        # As a whole: Adam makes a step as long as others of a gradient near 0, of which rounding may be all.
        weight = weight.double()  # ids that a drafter knows are integers
        assert (its[name] - weight).norm() < 1e-5 * weight.norm(), name
    for name in ("steps", "tokens", "tokens_per_step", "saved_step", "data_hash"):
        assert said[name] == told[name], name
    assert said["loss"] == pytest.approx(told["loss"], rel=1e-5)
    assert said["accuracy"] == pytest.approx(told["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        ["--recurrence", "apple"],
        ["--context-window", "8"],
        ["--lora-rank", "2"],
        ["--form", "dflash2"],
        ["--optimizer", "muon"],
    ],
    ids=["published", "context", "low rank", "blocks", "muon"],
)
def test_two_processes_are_one_that_accumulates_whoever_holds_the_base(tmp_path, form):
    one, two, shared = (tmp_path / name for name in ("one", "two", "shared"))
    if "--lora-rank" in form:
        assert main(command(tmp_path / "first", "--steps", "3")) == 0
        form = [*form, "--drafter", str(tmp_path / "first" / "out")]
    assert main(command(one, *STEPS, *form, "--accumulate", "2")) == 0
    assert together(two, *form).count("saved ") == 1
    together(shared, *form, "--shard-base")
    assert record(two)["processes"] == 2
    close(one, two)
    close(two, shared)


@pytest.mark.slow
def test_processes_end_at_the_same_step_when_the_minutes_of_the_first_are_over(tmp_path):
    options = ["--minutes", "0.03", "--batch-size", "2", "--no-pack"]
    codes, said = launch(tmp_path, command(tmp_path, *options))
    assert codes == [0, 0], said
    assert record(tmp_path)["processes"] == 2
    assert record(tmp_path)["steps"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_another_number_of_processes_goes_on_with_a_training(tmp_path, processes):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    form = ["--accumulate", "2", "--log-every", "4"]  # so that the last loss is of steps after the checkpoint
    together(whole, *form)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "out")
    said = together(resumed, *form, "--resume", processes=processes)
    assert "resuming from step 4" in said
    close(whole, resumed)
    checkpoint = Checkpoint.load(resumed / "out.checkpoints" / "step-0000004")
    assert checkpoint.identity.processes == 2


@pytest.mark.slow
def test_a_base_in_half_precision_is_shared_by_processes(tmp_path):
    """Its test in float32 would widen the weights that are being gathered."""
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    together(whole, "--dtype", "bfloat16")
    together(shared, "--dtype", "bfloat16", "--shard-base")
    close(whole, shared)


def test_nothing_is_shared_by_one_process(tmp_path, capsys):
    assert main(command(tmp_path, "--shard-base")) == 2
    assert "--shard-base is for several processes: start them with accelerate launch" in capsys.readouterr().err


@pytest.mark.variant  # two processes of their own
def test_processes_on_a_machine_without_a_gpu_train_together_though_nobody_said_cpu(tmp_path):
    arguments = command(tmp_path, "--steps", "2")
    arguments.remove("--cpu")
    codes, lines = launch(tmp_path, arguments, CUDA_VISIBLE_DEVICES="")
    assert codes == [0, 0], lines
    assert lines.count("saved ") == 1, lines
    assert record(tmp_path)["processes"] == 2


@pytest.mark.parametrize(("variable", "name"), SPREADING_VARIABLES.items())
def test_what_would_spread_the_drafter_is_refused_by_name(monkeypatch, variable, name):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UnsupportedError, match=f"accelerate is configured for {name}, .*--shard-base spreads the base"):
        new_accelerator(TrainConfig(cpu=True))


@pytest.mark.slow
def test_two_machines_train_the_drafter_of_two_processes(tmp_path):
    """Each machine has a file system of its own; the first one's has the output."""
    whole, *places = (tmp_path / name for name in ("together", "first", "second"))
    together(whole)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "no"]
    launcher += ["--dynamo_backend", "no", "--num_machines", "2", "--num_processes", "2"]
    launcher += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    program = Path(__file__).parents[2] / "train" / "train_drafter.py"
    started = [
        subprocess.Popen(
            [*launcher, "--machine_rank", str(rank), str(program), *command(place, *STEPS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(places)
    ]
    first, second = (process.communicate(timeout=300)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    torch.testing.assert_close(weights(places[0] / "out"), weights(whole / "out"), rtol=0, atol=0)
    assert first.count("saved ") == 1
    assert second == ""
    assert not list(places[1].glob("out*"))


@pytest.mark.slow
@pytest.mark.parametrize("differ", ["data", "checkpoints"])
def test_machines_that_see_other_files_are_refused(tmp_path, differ):
    first, second = tmp_path / "first", tmp_path / "second"
    other, more = [{"text": "another text than that of the first machine"}, {"text": "held out", "split": "val"}], []
    said = "process 1 has other data than process 0: give all the same --data"
    if differ == "checkpoints":
        together(first)
        shutil.rmtree(first / "out")
        other, more = None, ["--resume"]
        said = f"{first / 'out.checkpoints'}: process 0 finds step 4 to resume from, and process 1 none"
    commands = [command(first, *STEPS, *more), command(second, *STEPS, *more, rows=other)]
    processes = start_together([["train", *words] for words in commands], tmp_path)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [2, 2]
    assert said in (tmp_path / "said.0").read_text()
    assert differ == "data" or (first / "out.checkpoints" / "step-0000004").exists()


@pytest.mark.slow
def test_an_fsdp_configuration_of_accelerate_is_refused(tmp_path):
    """The launcher starts two processes, which once raced into one --output."""
    configuration = tmp_path / "fsdp.yaml"
    configuration.write_text(FSDP)
    program = Path(__file__).parents[2] / "train" / "train_drafter.py"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    launcher += ["--main_process_port", str(free_port()), str(program)]
    arguments = command(tmp_path, "--steps", "2")
    arguments.remove("--cpu")
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    assert "(exitcode: 2)" in done.stderr, done.stderr
    assert "redrafter: error: accelerate is configured for FSDP" in done.stderr
    assert not done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ctrl_c_in_one_process_saves_one_checkpoint_and_ends_all(tmp_path):
    words = command(tmp_path, "--steps", "5000", "--save-every", "1")
    processes = start_together([["train", *words]] * 2, tmp_path)
    assert soon(lambda: list((tmp_path / "out.checkpoints").glob("step-*")))
    os.kill(processes[1].pid, signal.SIGINT)
    for process in processes:
        process.join()
    first, second = ((tmp_path / f"said.{rank}").read_text() for rank in range(2))
    assert [process.exitcode for process in processes] == [130, 130], (first, second)
    assert first.count("redrafter: stopped: step ") == 1
    assert first.endswith(" is saved; the same command with --resume continues\n")
    assert not second.strip()


def test_processes_that_would_each_train_alone_are_refused(monkeypatch):
    new_accelerator(TrainConfig(cpu=True))  # by now this process is known to be alone
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="2 processes were started, which cannot work together on cpu"):
        new_accelerator(TrainConfig(cpu=True))


# Processes that end


ENDLESS = ["--steps", "100000", "--batch-size", "2", "--save-every", "5", "--validate-prompts", "0"]
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


LOST = "redrafter: error: another process has ended, for which this one waited (the launcher reports which)"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_that_is_killed_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path, killed):
    processes = start_together([["train", *command(tmp_path, *ENDLESS)]] * 3, tmp_path)
    checkpoints = tmp_path / "out.checkpoints"
    while not list(checkpoints.glob("step-*")) and all(process.is_alive() for process in processes):
        time.sleep(0.05)
    processes[killed].kill()
    assert codes_of(processes) == [-9 if rank == killed else 2 for rank in range(3)]
    assert errors(tmp_path, 3) == [LOST, LOST]
    newest = max(checkpoints.glob("step-*"))
    assert Checkpoint.load(newest).load_optimizer()
    assert RecurrentDrafter.from_pretrained(newest)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_alone_says_why_and_the_others_that_it_has_ended(tmp_path, failing):
    commands = [["train", *command(tmp_path, *ENDLESS)] for _ in range(3)]
    commands[failing][commands[failing].index("--data") + 1] = str(tmp_path / "nowhere.jsonl")
    assert codes_of(start_together(commands, tmp_path)) == [2, 2, 2]
    (error,) = [line for line in errors(tmp_path, 3) if line != LOST]
    assert "nowhere.jsonl cannot be read" in error
