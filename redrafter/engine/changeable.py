"""The part of an engine that an operator changes between two calls: weights, the drafter, and sleep."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from redrafter.drafting.drafter_model import DrafterModel
from redrafter.engine.changes import ChangeDrafter, Sleep, UpdateWeights, Wake
from redrafter.errors import ArgumentError
from redrafter.model.target import Target
from redrafter.scheduler.engine_change import EngineChange
from redrafter.scheduler.paged_memory import PagedMemory


class Changeable:
    """An engine's models, which are changed while no call is being decoded; `Engine` adds how calls are.

    A server's engine is changed by its scheduler, between two steps, with the same objects.
    """

    target: Target
    draft_model: Target | None
    drafter: DrafterModel | None = None
    previous_drafter: Mapping[str, Tensor] | None = None
    memory: PagedMemory | None
    lender: Any  # the engine whose memory is used, when not its own

    def __init__(self) -> None:
        """Begin without a call, once `target` is set."""
        self._gate, self._calls = threading.RLock(), 0  # calls that are being decoded
        self._derived_of = self.target.version  # what `derive` has made was made of these weights

    def update_weights(self, weights: str | Path | Mapping[str, Tensor]) -> list[str]:
        """Write new weights of the target in place, so that captured steps remain valid.

        Copies of the old weights are rebuilt (FP8 copies, and tables of drafters); stored prefixes are
        dropped. The proposer is unchanged: output is the new model's, but fewer drafts may be accepted.

        Args:
            weights: A directory that `save_pretrained` wrote or a .safetensors file, or tensors by the names of the
                model's `state_dict`, on any device. Numbers are rounded to the model's dtype. Files are read whole
                into memory first; they must be regular ones.

        Returns:
            Names of tensors in which numbers are NaN or infinite, as where training has diverged. They are written:
            sequences that need these numbers end with `NotFiniteError`.

        Raises:
            ArgumentError: A call of `generate` runs, or the engine is asleep.
            CheckpointError: A file cannot be read, or changes while it is read.
            MismatchError: Names, shapes or kinds of numbers are not the model's; no weight was written then.
            UnsupportedError: Processes share the model, or another library has quantised it.
        """
        change = UpdateWeights(self, weights)
        self._make(change)
        return list(change.not_finite)

    def change_drafter(self, drafter: DrafterModel | str | Path | None = None) -> list[str]:
        """Let another drafter of the same form draft from now on, whose weights are written in place.

        Args:
            drafter: A directory of this machine or a loaded drafter; None for the one that drafted before the last
                change.

        Returns:
            Names of its tensors in which numbers are NaN or infinite, with which it drafts nothing useful.

        Raises:
            ArgumentError: A call of `generate` runs, the engine is asleep, or there is no drafter before.
            CheckpointError: The directory cannot be read.
            MismatchError: It has another form, or was made for another base.
            UnsupportedError: Nothing that was trained for the target drafts here, or processes share the model.
        """
        change = ChangeDrafter(self, drafter)
        self._make(change)
        return list(change.not_finite)

    def sleep(self) -> None:
        """Release memory until `wake`: the KV cache and, on a GPU, the weights, which move to the host.

        All engines on the target sleep then. Raises as `update_weights` does; asleep already, it does nothing.
        """
        self._make(Sleep(self))

    def wake(self) -> None:
        """Take the memory again that `sleep` has given back, with the same weights.

        Steps are captured again where the memory has moved. Awake already, it does nothing.

        Raises:
            CacheFullError: The device has too little memory now; the engine sleeps on.
        """
        self._make(Wake(self))

    @property
    def asleep(self) -> bool:
        """True while the engine sleeps and writes nothing."""
        return self.target.parked is not None

    @property
    def targets(self) -> list[Target]:
        """The target, and the model that drafts if there is one."""
        return [self.target] if self.draft_model is None else [self.target, self.draft_model]

    @property
    def modules(self) -> list[object]:
        """All modules with weights: the models, and the drafter if there is one."""
        return [*(each.model for each in self.targets), *([] if self.drafter is None else [self.drafter])]

    def drop_graphs(self) -> None:
        """Forget the captured steps; `Engine` has some."""
        raise NotImplementedError

    def derive(self) -> None:
        """Rebuild, in place, the copies and tables derived from the weights of the target and the drafter."""
        self._derived_of = self.target.version

    def follow_changes(self, *, speculate: bool = True) -> None:
        """Detect changes of the models since the last call, and rebuild what is derived from other weights.

        Without `speculate`, only the target counts.

        Raises:
            ArgumentError: A model is another one now.
        """
        for model in self.targets if speculate else [self.target]:
            model.follow_changes()
        if self._derived_of != self.target.version:
            self.derive()

    @contextmanager
    def calling(self, *, speculate: bool) -> Iterator[None]:
        """Enter a context in which a call is decoded, with the models as they are now, and no change is made."""
        with self._gate:
            if self.asleep:
                raise ArgumentError("the engine is asleep, and writes nothing: call wake() first")
            self.follow_changes(speculate=speculate)
            self._calls += 1
        try:
            yield
        finally:
            with self._gate:
                self._calls -= 1

    def _make(self, change: EngineChange) -> None:
        """Make a change between two calls."""
        with self._gate:
            # A running call has read weights and captured steps that the change would replace.
            if self._calls:
                raise ArgumentError("generate() is running on this engine: change it before or after the call")
            memory = (self.lender or self).memory
            with nullcontext() if memory is None else memory.lock:
                outdated = change.apply(memory)
                if memory is not None and change.forgets:
                    memory.forget_texts()
            if outdated:
                self.drop_graphs()
