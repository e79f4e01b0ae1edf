"""Checkpoints of a training, from which it goes on as if it had never stopped.

    OUTPUT.checkpoints/step-0000200/    a drafter that loads, and optimizer.pt, random.pt, trainer.json
    OUTPUT.checkpoints/best/            the drafter that validation liked best, and trainer.json

Each is written whole or not at all. trainer.json says what a training must agree with to go on from there.
"""

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from redrafter.app.flags import flag
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, first_line
from redrafter.files.atomic_folder import remove_leftovers, write_folder
from redrafter.train.config import TrainConfig
from redrafter.train.progress import Standing

__all__ = ["Checkpoint", "Checkpoints", "Identity", "machine_state", "set_machine_state"]

# What may be another when a training goes on: what it does beside training, and what `Identity` holds by itself.
FREE = {"output", "overwrite", "resume", "dry_run", "show_sample", "save_every", "keep", "log_every", "report_to"}
FREE |= {"minutes", "save_dtype", "trust_remote_code", "validate_every", "model", "data", "drafter", "cpu"}


@dataclass(frozen=True)
class Identity:
    """What must be the same when a training goes on. data: a hash of what is learnt from. base: its name."""

    base: str
    data: str
    processes: int
    options: dict[str, Any]

    @classmethod
    def of(cls, config: TrainConfig, base: str, data: str, processes: int) -> "Identity":
        options = {name: value for name, value in asdict(config).items() if name not in FREE}
        return cls(base, data, processes, json.loads(json.dumps(options)))

    def check(self, made: dict[str, Any], place: Path) -> None:
        """Raise `MismatchError` or `ArgumentError`, naming what differs, unless a checkpoint was made by this
        training."""
        if made["base"] != self.base:
            raise MismatchError(f"{place} was made for the base {made['base']}, not {self.base}; pass --overwrite")
        for name in sorted(self.options.keys() | made["options"].keys()):
            old, new = (each.get(name) for each in (made["options"], self.options))
            if old != new:
                raise ArgumentError(
                    f"{place} was made with {flag(name)} {old}, now it is {new}; to go on, give it as it was"
                )
        if made["data"] != self.data:
            raise ArgumentError(f"{place} was made with other data; to go on, give the same --data")
        if made["processes"] != self.processes:
            raise ArgumentError(f"{place} was made by {made['processes']} processes, now there are {self.processes}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Its members raise `CheckpointError` when the files are not what they should be."""

    path: Path
    standing: Standing
    identity: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        try:
            told = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
            at = Standing(**{each.name: told["standing"][each.name] for each in fields(Standing)})
            at.walked = {int(step): value for step, value in at.walked.items()}
            identity = {each.name: told["identity"][each.name] for each in fields(Identity)}
            return cls(path, at, identity | {"options": dict(identity["options"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no checkpoint of a training: {first_line(error)}; delete it") from error

    def drafter(self) -> RecurrentDrafter:
        found: RecurrentDrafter = RecurrentDrafter.from_pretrained(self.path, dtype=torch.float32)
        return found

    def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What `Checkpoints.save` was given."""
        try:
            files = (self.path / "optimizer.pt", self.path / "random.pt")
            optimizer, machines = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
            return optimizer, machines
        except Exception as error:  # pickle has many
            raise CheckpointError(f"{self.path} cannot be read: {first_line(error)}; delete it") from error


class Checkpoints:
    """The checkpoints of one training, beside its output. keep: how many of the newest stay."""

    def __init__(self, output: Path, keep: int, identity: Identity):
        self.folder, self.keep, self.identity = output.with_name(output.name + ".checkpoints"), keep, identity

    @property
    def best(self) -> Path:
        return self.folder / "best"

    def tidy(self) -> None:
        """Remove what a training left that was killed while it wrote."""
        remove_leftovers(self.best)
        for leftover in (*self.folder.glob(".step-*"), *self.folder.parent.glob(f".{self.folder.name}.*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def drop(self) -> None:
        """Remove all of them, and nothing else that stands there."""
        for own in (*self._steps(), self.best):
            _remove(own)
        with suppress(OSError):
            self.folder.rmdir()

    def newest(self) -> Checkpoint | None:
        """The one to go on from. Raises as `Checkpoint.read` and `Identity.check` do."""
        steps = self._steps()
        if not steps:
            return None
        found = Checkpoint.read(steps[-1])
        if found.path.name != f"step-{found.standing.step!r:0>7}":
            raise CheckpointError(
                f"{found.path} is of step {found.standing.step!r}, not of what it is called; delete it"
            )
        self.identity.check(found.identity, found.path)
        return found

    def save(self, drafter: RecurrentDrafter, at: Standing, optimizer: dict[str, Any], machines: list[Any]) -> None:
        """optimizer, machines: what `Checkpoint.state` gives back. Raises as `write_folder` does."""

        def fill(folder: Path) -> None:
            self._fill(folder, drafter, at)
            torch.save(optimizer, folder / "optimizer.pt")
            torch.save(machines, folder / "random.pt")

        write_folder(self.folder / f"step-{at.step:07}", fill)
        for old in self._steps()[: -self.keep]:
            _remove(old)

    def save_best(self, drafter: RecurrentDrafter, at: Standing) -> None:
        write_folder(self.best, lambda folder: self._fill(folder, drafter, at))

    def _fill(self, folder: Path, drafter: RecurrentDrafter, at: Standing) -> None:
        drafter.save_pretrained(folder)
        told = {"standing": asdict(at), "identity": asdict(self.identity)}
        (folder / "trainer.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    def _steps(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def _remove(folder: Path) -> None:
    """Remove a folder; killed meanwhile, it is gone from under its name."""
    if folder.exists():
        dropped = folder.with_name(f".{folder.name}.dropped")
        shutil.rmtree(dropped, ignore_errors=True)
        folder.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)


def machine_state(accelerator: Accelerator) -> list[Any]:
    """Every process's random generators."""
    version, numbers, gauss = random.getstate()
    own = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return list(gather_object([own]))


def set_machine_state(accelerator: Accelerator, states: Sequence[dict[str, Any]]) -> None:
    own = states[accelerator.process_index]
    version, numbers, gauss = own["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(own["torch"])
    if accelerator.device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], accelerator.device)
