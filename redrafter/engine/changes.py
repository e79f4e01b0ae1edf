"""Changes of an engine between two steps: new weights, another drafter, sleep and waking."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from redrafter.checkpoints.drafters import check_fits_target
from redrafter.checkpoints.weights import read_weights
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.errors import ArgumentError, MismatchError, NotFiniteError, UnsupportedError
from redrafter.features import ENGINE_CHANGES, WEIGHT_UPDATES
from redrafter.formats.sources import load_foreign
from redrafter.model.target import Target
from redrafter.model.weights import NewWeights, ParkedMemory, snapshot
from redrafter.scheduler.engine_change import EngineChange

# Fields of a drafter's config about its training and defaults, which do not affect its computation.
NOT_OF_FORM = frozenset(
    {"draft_beams", "draft_len_per_beam", "trained_draft_len", "base_model", "base_embedding_norms"}
)


class ChangeableModels(Protocol):
    """The models of an engine that a change reads and writes; `Changeable` implements it."""

    target: Target
    drafter: DrafterModel | None
    previous_drafter: Mapping[str, Tensor] | None

    @property
    def targets(self) -> list[Target]:
        """The target, and the draft model if there is one."""

    @property
    def modules(self) -> list[Any]:
        """All modules with weights: the models, and the drafter if there is one."""

    def derive(self) -> None:
        """Rebuild the copies and tables derived from the weights of the target and the drafter."""

    def follow_changes(self, *, speculate: bool = True) -> None:
        """Detect changes of the models, and rebuild the tensors derived from their weights."""


class Sleep(EngineChange):
    """Releases the memory of the KV cache and, on a GPU, of the weights, which move to the host."""

    def __init__(self, engine: ChangeableModels):
        """Raise `UnsupportedError` for an engine that several processes share."""
        check_changeable(engine, asleep=None)
        self._engine = engine

    def apply(self) -> None:
        """Release the memory."""
        target = self._engine.target
        if target.asleep:
            return
        parked = ParkedMemory()
        for memory in list(target.shared.memories):
            memory.park(parked)
        with target.lock:
            if target.device.type != "cpu":  # a CPU's weights are on the host already
                for module in self._engine.modules:
                    parked.park([*module.parameters(), *module.buffers()], keep=True)
            target.shared.parked = parked
        if target.device.type == "cuda":
            # Only memory that torch's allocator has returned is free for other processes.
            torch.cuda.empty_cache()


class Wake(EngineChange):
    """Allocates the memory again that `Sleep` has released."""

    def __init__(self, engine: ChangeableModels):
        """Make the change, which does nothing for an engine that is awake."""
        self._engine = engine

    def apply(self) -> None:
        """Allocate the memory and restore the weights."""
        target = self._engine.target
        if (parked := target.shared.parked) is None:
            return
        with target.lock:
            target.shared.moved += not parked.restore()
            target.shared.parked = None
            for model in self._engine.targets:
                model.note_state()  # the same weights, perhaps at other addresses


class UpdateWeights(EngineChange):
    """Writes new weights of the target over the old ones, and rebuilds tensors derived from these."""

    def __init__(
        self,
        engine: ChangeableModels,
        weights: str | Path | Mapping[str, Tensor],
        allow_not_finite: bool = False,
    ):
        """Read the weights, check that they fit the target, and raise `NotFiniteError` for NaN unless allowed."""
        check_changeable(engine, asleep=False)
        target = engine.target
        target.features.check(WEIGHT_UPDATES)
        self._engine = engine
        self._new = NewWeights.for_module(target.model, read_weights(weights, target), target.name)
        self.not_finite = self._new.not_finite
        if self.not_finite and not allow_not_finite:
            raise NotFiniteError(
                f"{len(self.not_finite)} tensors of the new weights hold NaN or infinite numbers in the model's dtype, "
                f"such as {self.not_finite[0]}: none was written; allow_not_finite=True writes them"
            )

    def apply(self) -> None:
        """Write the weights."""
        check_changeable(self._engine, asleep=False)  # it may have been put to sleep since
        target = self._engine.target
        with target.lock:
            self._new.write()
        target.shared.written += 1
        self._engine.follow_changes()


class ChangeDrafter(EngineChange):
    """Writes the weights of another drafter of the same architecture over the active ones."""

    def __init__(self, engine: ChangeableModels, drafter: DrafterModel | str | Path | None):
        """Load a drafter and check that it fits."""
        check_changeable(engine, asleep=False)
        self._engine, mine = engine, engine.drafter
        if mine is None:
            raise UnsupportedError(
                "the engine has no trained drafter that could be replaced: start it with one (--drafter D)"
            )
        if drafter is None:
            if engine.previous_drafter is None:
                raise ArgumentError("there is no previous drafter: the drafter was never changed")
            weights = engine.previous_drafter
        else:
            name = type(drafter).__name__
            if isinstance(drafter, str | Path):
                name, drafter = str(drafter), load_foreign(drafter) or drafter
            if isinstance(drafter, str | Path):
                drafter = open_drafter_model(drafter)
            check_fits_target(drafter, engine.target)
            check_same_form(mine, drafter, name)
            weights = drafter.state_dict()
        self._new = NewWeights.for_module(mine, weights, "the drafter")
        self.not_finite = self._new.not_finite

    def apply(self) -> None:
        """Write the weights."""
        check_changeable(self._engine, asleep=False)
        drafter: Any = self._engine.drafter
        target = self._engine.target
        # Copied before the write, which is in place.
        before = snapshot(drafter)
        with target.lock:
            self._new.write()
        self._engine.previous_drafter = before
        target.shared.drafters += 1
        target.shared.written += target.drafter_layer is not None  # whose stored keys the old drafter has computed
        self._engine.derive()


def check_changeable(engine: ChangeableModels, *, asleep: bool | None) -> None:
    """Raise unless a single process owns the engine, and it is asleep or awake as required; None for either."""
    engine.target.features.check(ENGINE_CHANGES)
    if asleep is False and engine.target.asleep:
        raise ArgumentError("the engine is asleep, and its weights are on the host: wake it first")


def check_same_form(running: DrafterModel, other: DrafterModel, name: str) -> None:
    """Raise `MismatchError` unless two drafters have the same form; `name` identifies the second in the error.

    Captured steps and cached entries are then valid for both.
    """
    kinds = running.config.kind, other.config.kind
    if type(running) is not type(other):
        raise MismatchError(
            f"{name} is of the kind {kinds[1]}, and the engine drafts with {kinds[0]}: start a new engine with it"
        )
    theirs = {item.name for item in fields(PretrainedConfig)} | NOT_OF_FORM
    names = [item.name for item in fields(type(running.config)) if item.name not in theirs]
    pairs = {key: (getattr(other.config, key, None), getattr(running.config, key, None)) for key in names}
    if differing := [f"{key} is {a!r} instead of {b!r}" for key, (a, b) in pairs.items() if a != b]:
        raise MismatchError(
            f"{name} has another form than the current drafter ({', '.join(differing)}): start a new engine with it"
        )
