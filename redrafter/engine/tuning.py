"""Tree shapes by batch size, measured on one device for one pair.

`ReDrafter.from_pretrained` loads a tuning: a small JSON document that a person may edit; it affects the speed of
decoding, never the output.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from redrafter.checkpoints.drafters import embedding_norms
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.estimates import StepCosts
from redrafter.errors import ArgumentError, CheckpointError, MismatchError
from redrafter.files.atomic_file import check_writable, write_atomically
from redrafter.files.dtype_names import dtype_name
from redrafter.files.home import home
from redrafter.model.linear_layers import has_float8_layers
from redrafter.model.target import Target
from redrafter.tree.sizes import TreeShape


@dataclass(frozen=True)
class Tuning:
    """Tree shapes by batch size, and the device and models that they were measured on, as `measured_on` returns."""

    shapes: Mapping[int, TreeShape | None]  # by batch size; None where speculation does not pay and is off
    device: str
    dtype: str
    target: str
    drafter: str
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of packages
    # Time of a step with its shape by batch size, in steps of undrafted decoding. Sizes without a shape have none, and
    # older files have none at all.
    step_costs: Mapping[int, float] = field(default_factory=dict)
    costs: StepCosts | None = None  # costs of steps in seconds; absent in older files
    prompts: str = ""  # name of the file of prompts
    date: str = ""  # when it was measured
    measured: tuple[Mapping[str, object], ...] = ()  # raw measurements, for reference
    path: Path | None = field(default=None, compare=False)  # file that it was read from; not part of the document

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ArgumentError("a tuning needs the shape of at least one batch size")
        for rows in self.shapes:
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
                raise ArgumentError(f"a tuning's batch sizes are positive integers, got {rows!r}")
        for rows, cost in self.step_costs.items():
            if rows not in self.shapes:
                raise ArgumentError(f"a tuning has step costs only for the batch sizes in its shapes, got {rows!r}")
            if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 < cost < math.inf:
                raise ArgumentError(f"a tuning's step costs are positive numbers, got {cost!r}")

    def shape_for(self, rows: int) -> TreeShape | None:
        """Return the shape of the smallest measured batch size of at least `rows` rows, or else of the largest."""
        return self.shapes[self._size_for(rows)]

    def step_cost_for(self, rows: int) -> float | None:
        """Return the cost of a step with the shape for `rows` rows, in steps of plain decoding; None if unknown."""
        return self.step_costs.get(self._size_for(rows))

    def _size_for(self, rows: int) -> int:
        return min((size for size in self.shapes if size >= rows), default=max(self.shapes))

    def check(self, target: Target, drafter: DrafterModel, name: str) -> None:
        """Raise `MismatchError`, with both values, if file `name` was measured on another device or pair."""
        for what, theirs in measured_on(target, drafter).items():
            if (mine := getattr(self, what)) != theirs:
                raise MismatchError(
                    f"{name} was measured on another {what}: {mine}, but here it is {theirs}; "
                    "pass tuning=None (--tuning none)"
                )

    def to_dict(self) -> dict[str, object]:
        """Return the content of the tuning file: a dict of nothing but what JSON can express.

        Its keys are the names of the attributes. In `shapes` and `step_costs`, batch sizes are strings; each shape is a
        dict of its fields or None.
        """
        shapes = {str(rows): shape and shape.to_dict() for rows, shape in sorted(self.shapes.items())}
        costs = {str(rows): cost for rows, cost in sorted(self.step_costs.items())}
        curves = {} if self.costs is None else {"costs": self.costs.to_dict()}
        plain = {"versions": dict(self.versions), "measured": [*map(dict, self.measured)]}
        own = {name: value for name, value in vars(self).items() if name not in ("costs", "path")}
        return own | {"shapes": shapes, "step_costs": costs} | plain | curves

    def describe(self) -> str:
        """Return a line that names the file, the date, and the shape at each batch size, `off` where drafting is."""
        shapes = "; ".join(f"batch {rows}: {shape or 'off'}" for rows, shape in sorted(self.shapes.items()))
        return f"{self.path or 'a tuning'}, measured {self.date or 'at an unknown date'}: {shapes}"

    def write(self, path: str | Path) -> None:
        """Write the JSON document atomically."""
        with suppress(OSError):  # the next line reports it
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        check_writable(Path(path), "a tuning")
        write_atomically(Path(path), json.dumps(self.to_dict()) + "\n")

    @classmethod
    def from_file(cls, path: str | Path) -> "Tuning":
        """Read a tuning; `CheckpointError` when the file cannot be read or is not one."""
        try:
            return replace(_from_dict(json.loads(Path(path).read_text(encoding="utf-8"))), path=Path(path))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a tuning: {error}; pass tuning=None (--tuning none)") from error


def _from_dict(document: object) -> Tuning:
    if not isinstance(document, dict) or not isinstance(document.get("shapes"), dict):
        raise TypeError('it must be a JSON object with "shapes" by batch size')
    shapes = {int(rows): None if shape is None else TreeShape(**shape) for rows, shape in document["shapes"].items()}
    kinds = {"shapes": dict, "versions": dict, "step_costs": dict, "costs": dict, "measured": list}
    for name, value in document.items():
        if not isinstance(value, kind := kinds.get(name, str)):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    if not all(isinstance(row, dict) for row in document.get("measured", ())):
        raise TypeError("measured must be a list of objects")
    if missing := [name for name in ("device", "dtype", "target", "drafter") if name not in document]:
        raise TypeError(f"it lacks {', '.join(missing)}")
    if unknown := sorted(set(document) - {item.name for item in fields(Tuning) if item.name != "path"}):
        raise TypeError(f"it has unknown keys: {', '.join(unknown)}")
    costs = {int(rows): cost for rows, cost in document.get("step_costs", {}).items()}
    measured = tuple(document.get("measured", ()))
    curves = StepCosts.from_dict(document["costs"]) if "costs" in document else None
    return Tuning(**(document | {"shapes": shapes, "step_costs": costs, "costs": curves, "measured": measured}))


def find_tuning(tuning: str | Path | None, target: Target, drafter: DrafterModel) -> Tuning | None:
    """Return the tuning of `from_pretrained(tuning=...)`: for "auto", the one at `tuning_path`, if it exists."""
    if tuning is None:
        return None
    if not isinstance(tuning, str | Path) or not str(tuning):
        raise ArgumentError(f'tuning must be "auto", a path or None, got {tuning!r}')
    path = tuning_path(target, drafter) if tuning == "auto" else Path(tuning)
    if tuning == "auto" and not path.is_file():
        return None
    shapes = Tuning.from_file(path)
    shapes.check(target, drafter, str(path))
    return shapes


def tuning_path(target: Target, drafter: DrafterModel) -> Path:
    """Return the path of this pair's tuning for this device: under `$REDRAFTER_HOME`, or `~/.cache/redrafter`."""
    device, *others = measured_on(target, drafter).values()
    # A file name must be portable: only letters, digits and hyphens.
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return tuning_folder() / f"{'-'.join([*words, *others])}.json"


def tuning_folder() -> Path:
    """Return the folder of tunings that are found without a path."""
    return home() / "tuning"


def tunings_of(target: str, drafter: str) -> list[Tuning]:
    """Read the tunings that are used for a pair of these fingerprints, on any device and in any dtype."""
    return [Tuning.from_file(path) for path in sorted(tuning_folder().glob(f"*-{target}-{drafter}.json"))]


def measured_on(target: Target, drafter: DrafterModel) -> dict[str, str]:
    """Return the key of a tuning: names of the device and of the target's dtype, and fingerprints of both models."""
    return {
        "device": device_name(target.device),
        "dtype": dtype_name(target.dtype) + ("-fp8" if has_float8_layers(target.model) else ""),
        "target": target_fingerprint(target),
        "drafter": drafter_fingerprint(drafter),
    }


def device_name(device: torch.device) -> str:
    """Return the device's name given by its maker: "NVIDIA H200", "cpu x86_64"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}".strip()


def target_fingerprint(target: Target) -> str:
    """Return a digest of the model's sizes and a few norms, which distinguish it from other models of these sizes."""
    layers = getattr(target.config, "num_hidden_layers", None)
    norms = embedding_norms(target.embedding)
    return fingerprint_of_sizes(target.hidden_size, target.vocab_size, layers, norms)


def fingerprint_of_sizes(hidden_size: int, vocab_size: int, layers: int | None, norms: Sequence[float]) -> str:
    """Return the `target_fingerprint` of a model of these sizes with these norms of rows of its embedding table."""
    return _digest([hidden_size, vocab_size, layers, *_rounded(norms)])


def drafter_fingerprint(drafter: DrafterModel) -> str:
    """Return a digest of a drafter's weights: a retrained drafter has another digest, and needs a new tuning."""
    scheme = ["fp8"] if has_float8_layers(drafter) else []
    return _digest([*drafter.identity(), *_rounded(embedding_norms(cast(Any, drafter.fingerprint_layer))), *scheme])


def _rounded(norms: Sequence[float]) -> list[str]:
    """Return norms in two digits, so that the result does not depend on the order of summation."""
    return [f"{norm:.1e}" for norm in norms]


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
