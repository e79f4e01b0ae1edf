"""Checkpoints of a training run, from which `--resume` goes on as if the run had never stopped.

    OUTPUT.checkpoints/step-0000200/    a drafter that loads, and optimizer.pt, random.pt, trainer.json
    OUTPUT.checkpoints/best/            the drafter with the best validation, and trainer.json

A checkpoint is written whole or not at all. trainer.json says what a run must have in common with the one that wrote
it.
"""

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from redrafter.app.flags import flag, format_value
from redrafter.drafting.drafter_types import Drafter, open_drafter_model
from redrafter.drafting.text_drafters import TrainableDrafter, require
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.files.atomic_folder import remove_leftovers, write_folder
from redrafter.train.config import SIZED_OPTIONS, TrainConfig
from redrafter.train.init_drafter import form_of
from redrafter.train.output_folder import checkpoints_folder
from redrafter.train.progress import TrainingState

# Options that may differ when a run is resumed: they change nothing about the weights, or `TrainingIdentity` or the
# checkpoint's drafter holds what they stand for.
CHANGEABLE_OPTIONS = {
    *SIZED_OPTIONS,
    *("output", "overwrite", "resume", "dry_run", "show_sample", "save_every", "keep", "log_every", "report_to"),
    *("minutes", "save_dtype", "trust_remote_code", "validate_every", "model", "data", "drafter", "cpu"),
    "shard_drafter",
}


@dataclass(frozen=True)
class TrainingIdentity:
    """What must be the same when a run is resumed."""

    base: str  # name of the base model
    data: str  # hash of the windows that are trained on
    processes: int  # processes that began the training. Others may go on with it, if they can share its batches evenly.
    options: dict[str, Any]  # all options but those in `CHANGEABLE_OPTIONS`, as JSON

    @classmethod
    def from_config(cls, config: TrainConfig, base: str, data: str, processes: int) -> "TrainingIdentity":
        """Make the identity of a run from its config and the other attributes."""
        options = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE_OPTIONS}
        options["lr"] = config.peak_lr
        return cls(base, data, processes, json.loads(json.dumps(options)))

    def check(self, saved: dict[str, Any], path: Path) -> None:
        """Check that `saved`, the identity that a checkpoint in the folder `path` holds, is that of this run.

        Raises:
            MismatchError: It was made for another base.
            ArgumentError: An option or the data differ, or this number of processes cannot share the batches of its
                steps evenly; the message names it.
        """
        if saved["base"] != self.base:
            raise MismatchError(f"{path} was made for the base {saved['base']}, not {self.base}; pass --overwrite")
        for name in sorted((self.options.keys() | saved["options"].keys()) - CHANGEABLE_OPTIONS):
            default = getattr(TrainConfig, name, None)  # of an option that was not there yet
            old, new = saved["options"].get(name, default), self.options.get(name)
            if old != new:
                raise _other_option(path, name, old, new)
        if saved["data"] != self.data:
            raise ArgumentError(f"{path} was made with other data; to go on, give the same --data")
        batches = saved["processes"] * self.options["accumulate"]
        if batches % self.processes:
            raise ArgumentError(
                f"{path} was made with {batches} batches in a step, which {self.processes} processes cannot share "
                "evenly; start another number of them"
            )


def _other_option(path: Path, name: str, old: object, new: object) -> ArgumentError:
    return ArgumentError(
        f"{path} was made with {flag(name)} {format_value(old)}, now it is {format_value(new)}; "
        "to go on, give it as it was"
    )


def load_drafter(folder: str | Path) -> TrainableDrafter:
    """Load a drafter in float32, to be trained; raise `UnsupportedError` for a type that cannot be."""
    return require(TrainableDrafter, open_drafter_model(folder)).float()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Its methods raise `CheckpointError` for files that are missing or damaged."""

    path: Path  # folder of the checkpoint
    state: TrainingState  # progress of the run when the checkpoint was written
    identity: dict[str, Any]  # `TrainingIdentity` of the run, as a dict

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read trainer.json of a checkpoint."""
        try:
            document = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
            state = TrainingState.from_json(document["standing"])
            identity = {field.name: document["identity"][field.name] for field in fields(TrainingIdentity)}
            return cls(path, state, identity | {"options": dict(identity["options"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no checkpoint of a training: {first_line(error)}; delete it") from error

    def keep_form(self, config: TrainConfig) -> TrainConfig:
        """Return options with the form of this checkpoint's drafter. Raises `ArgumentError` where another was asked."""
        form = form_of(load_drafter(self.path).config)
        for name, old in form.items():
            new = getattr(config, name)
            if new not in (None, old):
                raise _other_option(self.path, name, old, new)
        return replace(config, **form)

    def load_optimizer(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Load the states of the optimizer and of every process's random generators, as given to `Checkpoints.save`."""
        try:
            files = (self.path / "optimizer.pt", self.path / "random.pt")
            optimizer, random_states = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
            return optimizer, random_states
        except Exception as error:  # pickle has many
            raise CheckpointError(f"{self.path} cannot be read: {first_line(error)}; delete it") from error


class Checkpoints:
    """The folder of checkpoints of one run, `OUTPUT.checkpoints` for its `output`, of which the `keep` newest stay."""

    def __init__(self, output: Path, keep: int, identity: TrainingIdentity):
        self.folder, self.keep, self.identity = checkpoints_folder(output), keep, identity

    @property
    def best(self) -> Path:
        """Folder of the drafter with the best validation."""
        return self.folder / "best"

    def remove_partial(self) -> None:
        """Remove what a run left behind that was killed while it wrote a checkpoint."""
        remove_leftovers(self.best)
        for leftover in (*self.folder.glob(".step-*"), *self.folder.parent.glob(f".{self.folder.name}.*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove all checkpoints, and the folder if nothing else is in it."""
        for checkpoint in (*self._steps(), self.best):
            _remove(checkpoint)
        with suppress(OSError):
            self.folder.rmdir()

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint, from which to resume; None where there is none.

        Raises:
            CheckpointError: Its files are missing or damaged.
            MismatchError: It was made for another base.
            ArgumentError: It was made by a run with other options.
        """
        steps = self._steps()
        if not steps:
            return None
        checkpoint = Checkpoint.load(steps[-1])
        if checkpoint.path.name != f"step-{checkpoint.state.step!r:0>7}":
            raise CheckpointError(
                f"{checkpoint.path} holds step {checkpoint.state.step!r}, not the step in its name; delete it"
            )
        self.identity.check(checkpoint.identity, checkpoint.path)
        return checkpoint

    def save(self, drafter: Drafter, state: TrainingState, optimizer: dict[str, Any], random_states: list[Any]) -> None:
        """Write a checkpoint and remove those that are too old. Raises as `write_folder` does.

        `Checkpoint.load_optimizer` gives back the states of the optimizer and of all processes' random generators.
        """

        def fill(folder: Path) -> None:
            self._fill(folder, drafter, state)
            torch.save(optimizer, folder / "optimizer.pt")
            torch.save(random_states, folder / "random.pt")

        write_folder(self.folder / f"step-{state.step:07}", fill)
        for old in self._steps()[: -self.keep]:
            _remove(old)

    def save_best(self, drafter: Drafter, state: TrainingState) -> None:
        """Write the drafter with the best validation, in place of the one before. Raises as `write_folder` does."""
        write_folder(self.best, lambda folder: self._fill(folder, drafter, state))

    def _fill(self, folder: Path, drafter: Drafter, state: TrainingState) -> None:
        drafter.save_pretrained(folder)
        document = {"standing": state.to_json(), "identity": asdict(self.identity)}
        (folder / "trainer.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def _remove(folder: Path) -> None:
    """Remove a folder so that a kill in between leaves nothing under its name."""
    if folder.exists():
        dropped = folder.with_name(f".{folder.name}.dropped")
        shutil.rmtree(dropped, ignore_errors=True)
        folder.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)


def check_same_start(accelerator: Accelerator, checkpoints: Checkpoints, resumed: Checkpoint | None) -> None:
    """Check that all processes read the same data and go on from one checkpoint. Collective: call it on every rank.

    `resumed` is the checkpoint that this process found; None where it found none. Raises `ArgumentError` where they
    found different ones, because their machines have file systems of their own.
    """
    all_data = gather_object([checkpoints.identity.data])
    for process, data in enumerate(all_data):
        if data != all_data[0]:
            raise ArgumentError(f"process {process} reads other texts than process 0: give all the same --data")
    steps = gather_object([None if resumed is None else resumed.state.step])
    for process, step in enumerate(steps):
        if step != steps[0]:
            first, other = ("none" if found is None else f"that of step {found}" for found in (steps[0], step))
            raise ArgumentError(
                f"checkpoints in {checkpoints.folder}: process 0 finds {first} to go on from, and process {process} "
                f"{other}; have the same ones on every machine, those of the first"
            )


def gather_random_states(accelerator: Accelerator) -> list[Any]:
    """Gather the states of every process's random generators. Collective: call it in every process."""
    version, numbers, gauss = random.getstate()
    state = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return list(gather_object([state]))


def restore_random_state(accelerator: Accelerator, states: Sequence[dict[str, Any]]) -> None:
    """Set this process's random generators to their state among those that `gather_random_states` gathered.

    They stay as they are where another number of processes wrote the states: only a caller's batches draw from them.
    """
    if states and len(states) != accelerator.num_processes:
        return
    state = states[accelerator.process_index]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if accelerator.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], accelerator.device)
