"""A training that is stopped, killed or out of disk goes on as if nothing had been, or says why it cannot."""

import json
import os
import random
import resource
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from helpers.apart import start
from helpers.training import base_dir, command, random_drafter, record, refused, tiny_model
from redrafter import ArgumentError, RecurrentDrafter
from redrafter.files.atomic_folder import remove_leftovers, write_folder
from redrafter.train import train_drafter
from redrafter.train.checkpoints import Checkpoint, Checkpoints, TrainingIdentity
from redrafter.train.config import TrainConfig
from redrafter.train.loop import train
from redrafter.train.progress import Progress
from redrafter.train.train_drafter import main

EVERY = ["--epochs", "6", "--save-every", "2", "--validate-every", "3", "--accumulate", "2", "--batch-size", "2"]


class Stopped(Exception):
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RecurrentDrafter.from_pretrained(folder).state_dict()


def same(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def facts(output: Path) -> dict:
    changing = {"command", "config", "seconds", "tokens_per_second", "seconds_beside", "loss", "accuracy"}
    return {name: value for name, value in record(output.parent).items() if name not in changing}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stop_after(monkeypatch: pytest.MonkeyPatch, saves: int, arguments: list[str]) -> None:
    """Run a training that is stopped once it has written `saves` checkpoints."""
    left, real = [saves], Checkpoints.save

    def save(self: Checkpoints, *arguments: object) -> None:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        real(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Checkpoints, "save", save)
        main(arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a training that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, *EVERY)) == 0
    return folder / "out"


@pytest.mark.parametrize(
    ("saves", "more"),
    [
        (0, []),
        (3, []),
        (1, ["--recurrence", "gated", "--steps", "9", "--context-window", "8"]),
        (3, ["--drafter", "WHOLE", "--lora-rank", "2"]),
        (1, ["--optimizer", "muon"]),
    ],
)
def test_a_training_that_goes_on_ends_bit_for_bit_where_it_would_have(
    tmp_path, monkeypatch, capsys, whole, more, saves
):
    expected, more = whole, [str(whole) if word == "WHOLE" else word for word in more]
    if more:
        assert main(command(tmp_path / "whole", *EVERY, *more)) == 0
        expected = tmp_path / "whole" / "out"
    arguments = command(tmp_path, *EVERY, *more)
    stop_after(monkeypatch, saves, arguments)
    assert not (tmp_path / "out").exists()
    torch.manual_seed(random.randrange(1000))
    capsys.readouterr()
    assert main([*arguments, "--resume", "--log-every", "3"]) == 0
    said = capsys.readouterr().out
    assert (f"resuming from step {2 * saves}" in said) == (saves > 0)
    assert same(weights(tmp_path / "out"), weights(expected))
    assert facts(tmp_path / "out") == facts(expected)


def test_a_training_on_the_batches_of_a_caller_continues(tmp_path):
    model, config = tiny_model(), TrainConfig(steps=6, draft_len=2, cpu=True, save_every=3)

    def batches(first=0):
        for step in range(first, 10):
            text = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(step))
            yield text, torch.ones_like(text, dtype=torch.bool)

    def checkpoints(name: str) -> Checkpoints:
        return Checkpoints(tmp_path / name, TrainingIdentity.from_config(config, "base", "data", 1))

    expected = random_drafter(model)
    report = train(model, expected, batches(), config, checkpoints=checkpoints("a"), log=lambda _: None)
    shutil.rmtree(tmp_path / "a.checkpoints" / "step-0000006")
    resumed = checkpoints("a").newest()
    drafter = RecurrentDrafter.from_pretrained(resumed.path)
    other = train(model, drafter, batches(3), config, resumed=resumed, log=lambda _: None)
    assert same(drafter.state_dict(), expected.state_dict())
    assert (report.step, report.tokens) == (other.step, other.tokens) == (6, report.tokens)
    assert other.seconds > resumed.state.seconds > 0


def test_checkpoints_load_as_drafters_and_the_oldest_go(whole):
    folder, told = whole.with_name("out.checkpoints"), facts(whole)
    last = told["steps"] - told["steps"] % 2
    assert names(folder) == ["best", f"step-{last - 2:07}", f"step-{last:07}"]
    assert last >= 12
    files = ["config.json", "model.safetensors", "optimizer.pt", "trainer.json"]
    assert names(folder / f"step-{last:07}") == files
    for each in folder.iterdir():
        drafter, at = RecurrentDrafter.from_pretrained(each), Checkpoint.load(each).state
        assert drafter.config.base_model == "base"
        assert drafter.config.trained_draft_len == 3
        assert at.tokens > 0
    assert not same(*(weights(folder / f"step-{step:07}") for step in (last, last - 2)))
    assert list(map(int, told["tokens_per_step"])) == [*range(3, told["steps"], 3), told["steps"]]


def found_by_validation(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> list[dict[str, torch.Tensor]]:
    """Replace the results of validations by `values`. Returns the weights that were validated."""
    seen = []
    real = train_drafter.TrainingSession.validate

    def validate(self: train_drafter.TrainingSession) -> float | None:
        seen.append({name: weight.clone() for name, weight in self.drafter.state_dict().items()})
        real(self)
        return values[len(seen) - 1]

    monkeypatch.setattr(train_drafter.TrainingSession, "validate", validate)
    return seen


def test_what_is_saved_is_called_by_its_own_step_where_a_training_did_not_repeat_itself(tmp_path, monkeypatch):
    arguments = command(tmp_path, "--steps", "4", "--validate-every", "1", "--save-every", "2")
    seen = found_by_validation(monkeypatch, [1.5, 1.0, 2.5, 1.0, 1.25, 1.125, 2.5])
    stop_after(monkeypatch, 1, arguments)
    assert main([*arguments, "--resume"]) == 0
    assert record(tmp_path)["saved_step"] == 3
    assert record(tmp_path)["tokens_per_step"] == {"1": 1.5, "2": 1.0, "3": 1.25, "4": 1.125}
    assert same(weights(tmp_path / "out"), seen[2])


def test_the_best_drafter_is_what_is_saved(tmp_path, monkeypatch, capsys):
    seen = found_by_validation(monkeypatch, [1.5, 2.5, 2.0, 2.5])
    assert main(command(tmp_path, "--steps", "3", "--validate-every", "1")) == 0
    assert "step 2 was the best of 3 validations" in capsys.readouterr().out
    assert [same(weights(tmp_path / "out"), found) for found in seen[:3]] == [False, True, False]
    assert record(tmp_path)["saved_step"] == 2
    assert "the weights of step 2, the best of 3 validations" in (tmp_path / "out" / "README.md").read_text()


def test_what_changed_since_is_refused_by_name(tmp_path, capsys, monkeypatch):
    arguments = command(tmp_path, "--steps", "8", "--save-every", "2")
    stop_after(monkeypatch, 2, arguments)
    kept = names(tmp_path / "out.checkpoints")

    def changed(said: str, *words: str) -> None:
        error = refused(capsys, [*arguments, *words, "--resume"])
        assert said in error
        assert "step-0000004" in error
        assert names(tmp_path / "out.checkpoints") == kept
        assert not (tmp_path / "out").exists()

    changed("--lr 0.001, now it is 0.01", "--lr", "0.01")
    changed("--steps 8, now it is 9", "--steps", "9")
    changed("without --target-layers, now it is none", "--target-layers", "none")
    changed("without --recurrence, now it is apple", "--recurrence", "apple")
    changed("--seed 0, now it is 1", "--seed", "1")
    data = tmp_path / "data.jsonl"
    text = data.read_text()
    data.write_text(text.replace("not to be", "to be not", 1))
    changed("other data")
    data.write_text(text)
    base_dir(tmp_path / "another")
    changed("for the base base, not another", "--model", str(tmp_path / "another"))
    (tmp_path / "base").rename(tmp_path / "moved")
    base_dir(tmp_path / "base", initializer_range=0.7)
    assert "made for another base" in refused(capsys, [*arguments, "--resume"])


def test_processes_go_on_that_share_the_batches_of_a_step_evenly():
    begun = TrainingIdentity("base", "data", 2, {"accumulate": 3})
    for processes in (1, 2, 3, 6):
        TrainingIdentity("base", "data", processes, {"accumulate": 3}).check(begun, Path("step-0000004"))
    with pytest.raises(ArgumentError, match="with 6 batches in a step, which 4 processes cannot share evenly"):
        TrainingIdentity("base", "data", 4, {"accumulate": 3}).check(begun, Path("step-0000004"))


def test_checkpoints_of_before_are_in_nobodys_way_unseen(tmp_path, capsys, monkeypatch):
    arguments = command(tmp_path, "--steps", "4", "--save-every", "2")
    stop_after(monkeypatch, 3, [*arguments, "--steps", "8"])
    assert names(tmp_path / "out.checkpoints") == ["step-0000004", "step-0000006"]
    assert "--resume, or start again with --overwrite" in refused(capsys, arguments)
    assert main([*arguments, "--overwrite", "--seed", "7"]) == 0
    assert names(tmp_path / "out.checkpoints") == ["step-0000002", "step-0000004"]
    assert Checkpoint.load(tmp_path / "out.checkpoints" / "step-0000002").identity.options["seed"] == 7
    (tmp_path / "out.checkpoints" / "step-0000004" / "trainer.json").write_text("{}")
    said = refused(capsys, [*arguments, "--overwrite", "--resume"])
    assert "step-0000004 is no checkpoint of a training" in said


def trained(folder: Path, *more: str, **options: object) -> list[str]:
    """Train for two steps, and keep the checkpoint with other options, left out if None. Returns how to go on."""
    arguments = command(folder, "--steps", "2", "--save-every", "2", "--validate-prompts", "0", "--resume")
    assert main([*arguments, *more]) == 0
    shutil.rmtree(folder / "out")
    written = folder / "out.checkpoints" / "step-0000002" / "trainer.json"
    trainer = json.loads(written.read_text())
    old = trainer["identity"]["options"] | options
    trainer["identity"]["options"] = {name: value for name, value in old.items() if options.get(name, 0) is not None}
    written.write_text(json.dumps(trainer))
    return arguments


def test_a_checkpoint_of_before_there_was_an_option_goes_on_with_its_default(tmp_path, capsys):
    arguments = trained(tmp_path, distill=None)
    assert main(arguments) == 0
    shutil.rmtree(tmp_path / "out")
    assert "--distill 0.9, now it is 0.5" in refused(capsys, [*arguments, "--distill", "0.5"])


# Kills


def test_a_checkpoint_that_is_not_what_it_should_be_is_named(tmp_path, capsys):
    arguments = trained(tmp_path)
    newest = tmp_path / "out.checkpoints" / "step-0000002"
    trainer = json.loads((newest / "trainer.json").read_text())

    def told(**changes: dict) -> str:
        return json.dumps({name: part | changes.get(name, {}) for name, part in trainer.items()})

    kept = {name: (newest / name).read_bytes() for name in ("trainer.json", "optimizer.pt")}
    for name, content, said in (
        ("trainer.json", told(standing={"tokens_per_step": [1]}), "is no checkpoint"),
        ("trainer.json", told(identity={"options": None}), "is no checkpoint"),
        ("optimizer.pt", {}, "is of another training"),
        ("optimizer.pt", {"optimizer": {"state": {}, "param_groups": []}, "scaler": None}, "is of another training"),
    ):
        if isinstance(content, str):
            (newest / name).write_text(content)
        else:
            torch.save(content, newest / name)
        error = refused(capsys, arguments)
        assert str(newest) in error
        assert said in error
        (newest / name).write_bytes(kept[name])
    assert main(arguments) == 0


def test_only_checkpoints_are_dropped(tmp_path, capsys):
    mine = tmp_path / "out.checkpoints" / "mine"
    mine.mkdir(parents=True)
    assert main(command(tmp_path, "--steps", "1", "--overwrite")) == 0
    assert mine.is_dir()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(mine.parent)
    mine.parent.write_text("mine")
    assert "cannot write" in refused(capsys, command(tmp_path, "--steps", "1", "--save-every", "1", "--resume"))
    assert mine.parent.read_text() == "mine"


def killed(arguments: list[str], checkpoint: Path, later: float) -> bool:
    """Run the command and kill it `later` seconds after a checkpoint appears. Returns whether it was still running."""
    process = start(["train", *arguments], Path(os.devnull))
    while process.is_alive() and not checkpoint.exists():
        time.sleep(0.001)
    time.sleep(later)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path, kills=3):
    """For a longer trial, call it with kills=10."""
    many = ["--steps", "30", "--validate-every", "3", "--validate-tokens", "6"]
    assert main(command(tmp_path / "whole", *many)) == 0
    arguments = command(tmp_path, *many, "--save-every", "1", "--resume")
    checkpoints = tmp_path / "out.checkpoints"
    steps = sorted(random.sample(range(1, 20), kills))
    for step in steps:
        assert killed(arguments, checkpoints / f"step-{step:07}", random.uniform(0, 0.02))
        for each in checkpoints.iterdir():
            if not each.name.startswith("."):
                RecurrentDrafter.from_pretrained(each)
                Checkpoint.load(each).load_optimizer() if each.name != "best" else None
    assert main(arguments) == 0
    assert same(weights(tmp_path / "out"), weights(tmp_path / "whole" / "out"))
    assert facts(tmp_path / "out") == facts(tmp_path / "whole" / "out")
    assert not [name for folder in (tmp_path, checkpoints) for name in names(folder) if name[0] == "."]


@contextmanager
def largest_file(size: int):
    """Let writes of more bytes to a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_resume(tmp_path, capsys, monkeypatch):
    arguments, shown = command(tmp_path, "--steps", "3"), Progress.__str__

    def interrupt(progress: Progress) -> str:
        signal.raise_signal(signal.SIGINT)
        return shown(progress)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "__str__", interrupt)
        assert main(arguments) == 130
    said = "redrafter: stopped: step 1 is saved; the same command with --resume continues\n"
    assert capsys.readouterr().err.endswith(said)
    assert main([*arguments, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "resuming from step 1" in out
    assert "\nstep 3/3 " in out  # the last step, which no interval ends
    assert f"to try it: redrafter generate --model {tmp_path / 'base'} --drafter {tmp_path / 'out'} --compare" in out


@pytest.mark.parametrize("size", [100, 5000, 50_000])
def test_a_full_disk_is_said_and_leaves_whole_checkpoints_only(tmp_path, capsys, monkeypatch, size):
    arguments = command(tmp_path, "--steps", "8", "--save-every", "2")
    stop_after(monkeypatch, 2, arguments)
    kept = names(tmp_path / "out.checkpoints")
    with largest_file(size):
        error = refused(capsys, [*arguments, "--resume"])
    assert f"cannot write {tmp_path / 'out.checkpoints' / 'step-0000006'}" in error
    assert "free some space" in error
    assert names(tmp_path / "out.checkpoints") == kept
    assert not (tmp_path / "out").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert main([*arguments, "--resume"]) == 0
    with largest_file(size):
        assert f"cannot write {tmp_path / 'out'}:" in refused(capsys, [*arguments, "--overwrite", "--resume"])
    RecurrentDrafter.from_pretrained(tmp_path / "out")


def test_a_folder_is_the_old_one_or_the_new_one_wherever_writing_stops(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    write_folder(folder, lambda place: (place / "text").write_text("old"))
    real = Path.rename
    for calls in range(3):
        done = []

        def rename(path: Path, target: Path) -> Path:
            if len(done) == calls:  # noqa: B023
                raise KeyboardInterrupt
            done.append(target)  # noqa: B023
            return real(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", rename)
            patched.setattr("redrafter.files.atomic_folder.remove_leftovers", lambda _: None)  # as after a kill
            with suppress(KeyboardInterrupt):
                write_folder(folder, lambda place: (place / "text").write_text("new"))
        remove_leftovers(folder)
        assert names(tmp_path) == ["out"]
        assert (folder / "text").read_text() == ("new" if calls == 2 else "old")


def test_one_process_writes_a_folder_at_a_time(tmp_path):
    folder = tmp_path / "out"

    def fill(place: Path) -> None:
        (place / "text").write_text("mine")
        with pytest.raises(ArgumentError, match="another process is writing"):
            write_folder(folder, lambda place: (place / "text").write_text("theirs"))
        remove_leftovers(folder)

    write_folder(folder, fill)
    assert names(tmp_path) == ["out"]
    assert (folder / "text").read_text() == "mine"
