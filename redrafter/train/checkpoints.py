"""Save and load checkpoints of a training run, from which `--resume` continues as if the run had never stopped.

    OUTPUT.checkpoints/step-0000200/    a drafter that loads, optimizer.pt and trainer.json
    OUTPUT.checkpoints/best/            the drafter with the best validation, and trainer.json

A checkpoint appears only once it is complete. trainer.json records the settings that a resumed run must share.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from redrafter.app.flags import flag, format_value
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.drafting.text_drafters import TrainableDrafter, require
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.files.atomic_folder import remove_leftovers, write_folder
from redrafter.train.config import TrainConfig, checkpoints_folder
from redrafter.train.progress import TrainingState

KEPT = 2  # newest checkpoints, in addition to the best drafter
# Options that may differ in a resumed run: they do not affect the weights, or their effect is recorded by
# `TrainingIdentity` or the checkpoint's drafter.
CHANGEABLE_OPTIONS = {
    *("output", "overwrite", "resume", "dry_run", "show_sample", "save_every", "log_every"),
    *("minutes", "save_dtype", "trust_remote_code", "validate_every", "model", "data", "drafter", "cpu"),
    "recipe",
}


@dataclass(frozen=True)
class TrainingIdentity:
    """The properties of a run that must not change when it is resumed."""

    base: str  # name of the base model
    data: str  # hash of the training windows
    processes: int  # processes that started the training; another number may resume it if it divides the batches evenly
    options: dict[str, object]  # all options but those in `CHANGEABLE_OPTIONS`, as JSON

    @classmethod
    def from_config(cls, config: TrainConfig, base: str, data: str, processes: int) -> "TrainingIdentity":
        """Create the identity of a run from its config and the other attributes."""
        options = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE_OPTIONS}
        # Compare the effective rate: an explicit --lr equal to the default is the same run.
        options["lr"] = config.peak_lr
        return cls(base, data, processes, json.loads(json.dumps(options)))

    def check(self, saved: "TrainingIdentity", path: Path) -> None:
        """Check that `saved`, the identity in the checkpoint in the folder `path`, matches this run.

        Raises:
            MismatchError: The checkpoint belongs to another base.
            ArgumentError: An option or the data differ, or this number of processes does not divide the batches of a
                step evenly; the message names the difference.
        """
        if saved.base != self.base:
            raise MismatchError(f"{path} was made for the base {saved.base}, not {self.base}; pass --overwrite")
        for item in fields(TrainConfig):  # in the order of the command's help: what sizes follow from before the sizes
            # The default of an option that was added since is that of before.
            old, new = saved.options.get(item.name, item.default), self.options.get(item.name, item.default)
            if old != new and item.name not in CHANGEABLE_OPTIONS:
                was, now = (format_value(tuple(x) if isinstance(x, list) else x) for x in (old, new))
                made = f"without {flag(item.name)}" if old is None else f"with {flag(item.name)} {was}"
                now = "it is left out" if new is None else f"it is {now}"
                raise ArgumentError(f"{path} was made {made}, now {now}; to continue, give the same options")
        if saved.data != self.data:
            raise ArgumentError(f"{path} was made with other data; to continue, give the same --data")
        # Another number of processes may resume if it can take the same batches per step, which keeps the data order.
        accumulate = self.options["accumulate"]
        assert isinstance(accumulate, int)
        batches = saved.processes * accumulate
        # Each process must take the same number of batches per step.
        if batches % self.processes:
            raise ArgumentError(
                f"{path} was made with {batches} batches in a step, which {self.processes} processes cannot share "
                "evenly; start another number of them"
            )


def load_drafter(folder: str | Path) -> TrainableDrafter:
    """Load a drafter in float32 for training; raise `UnsupportedError` if its type cannot be trained."""
    return require(open_drafter_model(folder), "train").float()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Methods raise `CheckpointError` for missing or damaged files."""

    path: Path  # folder of the checkpoint
    state: TrainingState  # progress of the run when the checkpoint was written
    identity: TrainingIdentity  # of the run that wrote the checkpoint

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read trainer.json of a checkpoint."""
        try:
            document = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
            state = TrainingState.from_json(document["standing"])
            identity = {field.name: document["identity"][field.name] for field in fields(TrainingIdentity)}
            return cls(path, state, TrainingIdentity(**identity | {"options": dict(identity["options"])}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no checkpoint of a training: {first_line(error)}; delete it") from error

    def load_optimizer(self) -> dict[str, Any]:
        """Load the state of the optimizer, as given to `Checkpoints.save`."""
        try:
            optimizer: dict[str, Any] = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
            return optimizer
        except Exception as error:  # unpickling raises many types
            raise CheckpointError(f"{self.path} cannot be read: {first_line(error)}; delete it") from error


class Checkpoints:
    """The folder of checkpoints of a run, `OUTPUT.checkpoints`; keeps the `KEPT` newest."""

    def __init__(self, output: Path, identity: TrainingIdentity):
        self.folder, self.identity = checkpoints_folder(output), identity

    @property
    def best(self) -> Path:
        """Folder of the drafter with the best validation."""
        return self.folder / "best"

    def remove_partial(self) -> None:
        """Remove partial checkpoints of a run that was killed while writing one."""
        remove_leftovers(self.best)
        for leftover in (*self.folder.glob(".step-*"), *self.folder.parent.glob(f".{self.folder.name}.*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove all checkpoints, and the folder if it is empty."""
        for checkpoint in (*self._steps(), self.best):
            _remove(checkpoint)
        with suppress(OSError):
            self.folder.rmdir()

    def newest(self) -> Checkpoint | None:
        """Load the newest checkpoint, from which to resume; None if there is none.

        Raises:
            CheckpointError: Its files are missing or damaged.
            MismatchError: It belongs to another base.
            ArgumentError: It belongs to a run with other options.
        """
        steps = self._steps()
        if not steps:
            return None
        checkpoint = Checkpoint.load(steps[-1])
        # After the checks of the file itself, so that damage is not reported as another option.
        self.identity.check(checkpoint.identity, checkpoint.path)
        return checkpoint

    def save(self, drafter: DrafterModel, state: TrainingState, optimizer: dict[str, Any]) -> None:
        """Write a checkpoint, with the state of the optimizer, and remove old ones. Raises as `write_folder` does."""

        def fill(folder: Path) -> None:
            self._fill(folder, drafter, state)
            torch.save(optimizer, folder / "optimizer.pt")

        # Remove old checkpoints only once the new one is complete.
        write_folder(self.folder / f"step-{state.step:07}", fill)
        for old in self._steps()[:-KEPT]:
            _remove(old)

    def save_best(self, drafter: DrafterModel, state: TrainingState) -> None:
        """Write the drafter with the best validation, replacing the last one. Raises the errors of `write_folder`."""
        write_folder(self.best, lambda folder: self._fill(folder, drafter, state))

    def _fill(self, folder: Path, drafter: DrafterModel, state: TrainingState) -> None:
        drafter.save_pretrained(folder)
        document = {"standing": state.to_json(), "identity": asdict(self.identity)}
        (folder / "trainer.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def _steps(self) -> list[Path]:
        # Sort by length first: a step number above seven digits is longer and newer.
        return sorted(self.folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def _remove(folder: Path) -> None:
    """Remove a folder atomically: rename it first, so that a kill leaves no partial folder under its name."""
    if folder.exists():
        dropped = folder.with_name(f".{folder.name}.dropped")
        shutil.rmtree(dropped, ignore_errors=True)
        folder.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)


def check_same_start(accelerator: Accelerator, checkpoints: Checkpoints, resumed: Checkpoint | None) -> None:
    """Check that all processes have the same data and the same checkpoint. Collective: call it on every rank.

    `resumed` is the checkpoint that this process found; None if it found none. Raises `ArgumentError` if the processes
    differ, as on machines without a shared file system.
    """
    step = "none" if resumed is None else f"step {resumed.state.step}"
    starts = gather_object([(checkpoints.identity.data, step)])
    (data, first), *_ = starts
    for process, (other_data, other) in enumerate(starts):
        if other_data != data:
            raise ArgumentError(f"process {process} has other data than process 0: give all the same --data")
        if other != first:
            raise ArgumentError(
                f"checkpoints in {checkpoints.folder}: process 0 finds {first} to resume from, and process {process} "
                f"{other}; copy the checkpoints of process 0 to every machine"
            )
