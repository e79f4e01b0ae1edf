"""The models of an engine, and how an operator changes them between two calls or two steps of a server.

The changes are new weights, another drafter, adapters, sleep and waking.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from redrafter.cache.to_device import on_device
from redrafter.checkpoints.adapters import read_adapter
from redrafter.checkpoints.drafters import check_fits_target
from redrafter.checkpoints.weights import Weights, read_weights
from redrafter.drafting.drafter_model import DrafterModel
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError, CacheFullError, MismatchError, NotFiniteError, UnsupportedError
from redrafter.features import WEIGHT_UPDATES
from redrafter.formats.sources import load_drafter_model
from redrafter.model.lora import LoraWeights
from redrafter.model.shared_model import SharedModel
from redrafter.model.target import Target
from redrafter.model.weights import NewWeights, ParkedMemory, snapshot
from redrafter.scheduler.engine_change import EngineChange
from redrafter.scheduler.paged_memory import PagedMemory

# Fields of a drafter's config about its training and defaults, which do not affect its computation.
NOT_OF_FORM = {"draft_beams", "draft_len_per_beam", "trained_draft_len", "base_model", "base_embedding_norms"}


class Sleep(EngineChange):
    """Releases the memory of the KV cache and, on a GPU, of the weights, which move to the host."""

    def __init__(self, engine: "Changeable"):
        """Make the change, which does nothing for an engine that is asleep."""
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

    def __init__(self, engine: "Changeable"):
        """Make the change, which does nothing for an engine that is awake."""
        self._engine = engine

    def apply(self) -> None:
        """Allocate the memory and restore the weights."""
        target = self._engine.target
        if (parked := target.shared.parked) is None:
            return
        with target.lock:
            moved, error = False, None
            try:
                moved = not parked.restore()
            except CacheFullError as failure:
                error = failure
            failed = next(filter(None, target.ranks.gather(error)), None)
            if failed is None or error is None:
                # Ranks decide alike whether steps are captured again.
                target.shared.moved += any(target.ranks.gather(moved))
                target.shared.parked = None
                for model in self._engine.targets:
                    model.note_state()  # the same weights, perhaps at other addresses
        if failed is not None:
            Sleep(self._engine).apply()
            raise failed


class UpdateWeights(EngineChange):
    """Writes new weights of the target over the old ones, and rebuilds tensors derived from these."""

    def __init__(self, engine: "Changeable", weights: Weights, allow_not_finite: bool = False):
        """Read the weights, check that they fit the target, and raise `NotFiniteError` for NaN unless allowed."""
        check_awake(engine)
        target = engine.target
        target.features.check(WEIGHT_UPDATES)
        self._engine = engine
        self._new = target.ranks.together(
            lambda: NewWeights.for_module(target.model, read_weights(weights, target), target.name)
        )
        # Those that any rank has, by the names of the whole model.
        found = (name.replace(".part.", ".") for names in target.ranks.gather(self._new.not_finite) for name in names)
        self.not_finite = list(dict.fromkeys(found))
        if self.not_finite and not allow_not_finite:
            raise NotFiniteError(
                f"{len(self.not_finite)} tensors of the new weights hold NaN or infinite numbers in the model's dtype, "
                f"such as {self.not_finite[0]}: none was written; allow_not_finite=True writes them"
            )

    def apply(self) -> None:
        """Write the weights."""
        check_awake(self._engine)  # it may have been put to sleep since
        target = self._engine.target
        with target.lock:
            self._new.write()
        target.shared.written += 1
        self._engine.follow_changes()


class ChangeDrafter(EngineChange):
    """Writes the weights of another drafter of the same architecture over the active ones."""

    def __init__(self, engine: "Changeable", drafter: DrafterModel | str | Path | None):
        """Load a drafter and check that it fits."""
        check_awake(engine)
        self._engine, mine = engine, engine.drafter
        if mine is None:
            message = "the engine has no trained drafter that could be replaced: start it with one (--drafter D)"
            raise UnsupportedError(message)
        if drafter is None:
            if engine.previous_drafter is None:
                raise ArgumentError("there is no previous drafter: the drafter was never changed")
            weights = engine.previous_drafter
        else:
            weights = engine.target.ranks.together(lambda: self._read(drafter))
        self._new = NewWeights.for_module(mine, weights, "the drafter")
        self.not_finite = self._new.not_finite

    def _read(self, drafter: DrafterModel | str | Path) -> Mapping[str, Tensor]:
        name, mine = type(drafter).__name__, self._engine.drafter
        assert mine is not None
        if isinstance(drafter, str | Path):
            name, drafter = str(drafter), load_drafter_model(drafter)
        check_fits_target(drafter, self._engine.target)
        check_same_form(mine, drafter, name)
        weights: Mapping[str, Tensor] = drafter.state_dict()
        return weights

    def apply(self) -> None:
        """Write the weights."""
        check_awake(self._engine)
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


def check_awake(engine: "Changeable") -> None:
    """Raise `ArgumentError` if the engine is asleep."""
    if engine.target.asleep:
        raise ArgumentError("the engine is asleep, and its weights are on the host: wake it first")


def check_same_form(running: DrafterModel, other: DrafterModel, name: str) -> None:
    """Raise `MismatchError` unless two drafters have the same form; `name` identifies the second in the error.

    Captured steps and cached entries are then valid for both.
    """
    kinds = running.config.kind, other.config.kind
    if type(running) is not type(other):
        message = f"{name} is of the kind {kinds[1]}, and the engine drafts with {kinds[0]}: start a new engine with it"
        raise MismatchError(message)
    theirs = {item.name for item in fields(PretrainedConfig)} | NOT_OF_FORM
    names = [item.name for item in fields(type(running.config)) if item.name not in theirs]
    pairs = {key: (getattr(other.config, key, None), getattr(running.config, key, None)) for key in names}
    if differing := [f"{key} is {a!r} instead of {b!r}" for key, (a, b) in pairs.items() if a != b]:
        raise MismatchError(f"{name} has another form than this drafter ({', '.join(differing)}): start a new engine")


class Changeable:
    """The models of an engine, which are changed while no call is decoded; `Engine` adds the decoding of calls.

    The scheduler of a server changes its engine with the same objects, between two steps.
    """

    target: Target
    options: EngineOptions
    memory: PagedMemory | None
    lender: "Changeable | None"
    draft_model: Target | None
    drafter: DrafterModel | None = None
    previous_drafter: Mapping[str, Tensor] | None = None

    def __init__(self) -> None:
        """Begin, once `target` is set."""
        self._derived_of = self.target.revision.weights  # revision of the weights that `derive` has used

    def update_weights(self, weights: Weights, *, allow_not_finite: bool = False) -> list[str]:
        """Write new weights of the target in place, so that captured steps remain valid.

        Copies of the old weights are rebuilt (FP8 copies, and tables of drafters); stored prefixes are dropped. The
        proposer is unchanged: the output is the new model's, but fewer drafts may be accepted.

        Args:
            weights: A directory that `save_pretrained` wrote or a .safetensors file, or tensors by the names of the
                model's `state_dict`, on any device. Numbers are rounded to the model's dtype. Files are read whole
                into memory first; they must be regular ones.
            allow_not_finite: Write NaN and infinite numbers too, as after training that diverged. Sequences that need
                them end with `NotFiniteError`.

        Returns:
            Names of tensors with NaN or infinite numbers.

        Raises:
            ArgumentError: A call of `generate` runs, or the engine is asleep.
            CheckpointError: A file cannot be read, or changes while it is read.
            MismatchError: Names, shapes or dtypes are not the model's; no weight was written.
            NotFiniteError: Numbers are NaN or infinite, and not allowed; no weight was written.
            UnsupportedError: Another library has quantised the model.
        """
        change = UpdateWeights(self, weights, allow_not_finite)
        self._make(change)
        return list(change.not_finite)

    def change_drafter(self, drafter: DrafterModel | str | Path | None = None) -> list[str]:
        """Replace the drafter by another one of the same form, whose weights are written in place.

        Args:
            drafter: A directory of this machine or a loaded drafter; None for the one that drafted before the last
                change.

        Returns:
            Names of its tensors with NaN or infinite numbers, with which it drafts nothing useful.

        Raises:
            ArgumentError: A call of `generate` runs, the engine is asleep, or there is no previous drafter.
            CheckpointError: The directory cannot be read.
            MismatchError: It has another form, or was made for another base.
            UnsupportedError: The engine has no trained drafter.
        """
        change = ChangeDrafter(self, drafter)
        self._make(change)
        return list(change.not_finite)

    def load_adapter(self, name: str, path: str | Path | LoraWeights) -> None:
        """Load a LoRA adapter of the model, for sequences that request it by name.

        Engines on one target share its adapters. The proposer is unchanged, which affects no token: if an adapter
        changes the output, fewer drafts are accepted.

        Args:
            name: Name of the adapter.
            path: Directory that PEFT's `save_pretrained` wrote, or the result of `read_adapter`.

        Raises:
            ArgumentError: The name is taken, or `max_loras` or `max_lora_rank` is exceeded.
            CheckpointError: The directory cannot be read.
            MismatchError: The adapter was made for another model.
            UnsupportedError: The adapter is more than LoRA on linear layers, or the engine is batch-invariant.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the name of an adapter must be a non-empty string, got {name!r}")
        weights = path if isinstance(path, LoraWeights) else self.target.ranks.together(lambda: read_adapter(path))
        memory = (self.lender or self).memory
        # The lock keeps steps from being captured in the meantime.
        with nullcontext() if memory is None else memory.lock, on_device(self.target.device):
            self.target.adapters.load(name, weights, self.options.max_loras, self.options.max_lora_rank)

    def load_adapters(self, adapters: Mapping[str, str | Path] | None) -> None:
        """Load LoRA adapters by name; None for none."""
        for name, path in (adapters or {}).items():
            self.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Sequences that use it continue.

        Raises:
            ArgumentError: There is no such adapter.
        """
        self.target.adapters.unload(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that are loaded."""
        return self.target.adapters.names

    def sleep(self) -> None:
        """Release memory until `wake`: the KV cache and, on a GPU, the weights, which move to the host.

        All engines on the target sleep then. Raises the errors of `update_weights`; does nothing if asleep already.
        """
        self._make(Sleep(self))

    def wake(self) -> None:
        """Allocate the memory again that `sleep` has released, with the same weights.

        Steps are captured again if the memory has moved. Does nothing if awake already.

        Raises:
            CacheFullError: The device has too little memory now; the engine stays asleep.
        """
        self._make(Wake(self))

    @property
    def asleep(self) -> bool:
        """True while the engine sleeps and decodes nothing."""
        return any(model.asleep for model in self.targets)

    @property
    def targets(self) -> list[Target]:
        """The target, and the model that drafts if there is one."""
        return [self.target] if self.draft_model is None else [self.target, self.draft_model]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules with weights: the models, and the drafter if there is one."""
        return [*(each.model for each in self.targets), *([] if self.drafter is None else [self.drafter])]

    def derive(self) -> None:
        """Rebuild, in place, the copies and tables derived from the weights of the target and the drafter."""
        self._derived_of = self.target.revision.weights

    def follow_changes(self, *, speculate: bool = True) -> None:
        """Detect changes of the models since the last call, and rebuild everything derived from outdated weights.

        Without `speculate`, only the target is checked.

        Raises:
            ArgumentError: A model object was replaced.
        """
        for model in self.targets if speculate else [self.target]:
            model.follow_changes()
        if self._derived_of != self.target.revision.weights:
            self.derive()

    @contextmanager
    def calling(self, *, speculate: bool) -> Iterator[None]:
        """Enter a context in which a call is decoded with the models' current weights, and no change is made."""
        with self._gates() as shared, on_device(self.target.device):
            if self.asleep:
                raise ArgumentError("the engine is asleep and decodes nothing: call wake() first")
            self.follow_changes(speculate=speculate)
            # Counts, not the gates themselves: calls of several threads may run at once, but no change.
            for each in shared:
                each.calls += 1
        try:
            with on_device(self.target.device):
                yield
        finally:
            with self._gates() as shared:
                for each in shared:
                    each.calls -= 1

    @contextmanager
    def _gates(self) -> Iterator[list[SharedModel]]:
        """Hold the gates of all models, which other engines may share."""
        shared = sorted({model.shared for model in self.targets}, key=id)  # in one order for all threads
        with ExitStack() as held:
            for each in shared:
                held.enter_context(each.gate)
            yield shared

    def _make(self, change: EngineChange) -> None:
        """Make a change between two calls."""
        with self._gates() as shared:
            if any(each.calls for each in shared):
                raise ArgumentError("generate() is running on this model: change it before or after the call")
            change.apply()
