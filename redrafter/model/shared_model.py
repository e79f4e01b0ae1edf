"""The state of a model that all targets on it share: who computes with it, and how its owner or an operator changed it.

Whatever is kept between steps depends on the models: keys and values on their weights, captured steps on their
addresses and code, statistics of acceptance on the drafter. So each of these stores the `Revision` that it belongs to,
and compares it with the current one before its next use. Nothing else is notified of a change.
"""

import threading
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from redrafter.model.weights import ParkedMemory


class Revision(NamedTuple):
    """Counts the changes of a model; equal counts mean that nothing has changed.

    Attributes:
        weights: Changes after which stored keys and values are wrong.
        steps: Changes after which captured steps are wrong.
        drafter: Exchanges of the drafter, after which statistics of acceptance are of no use.
    """

    weights: int
    steps: int
    drafter: int


class StoredTexts(Protocol):
    """Keys and values that were computed with a model; `PagedMemory` implements it."""

    def park(self, parked: ParkedMemory) -> None:
        """Release their memory until `parked` is restored."""


class SharedModel:
    """The state of a model that all targets on it share, whichever engine they belong to.

    Attributes:
        lock: Held while a forward sets anything on the model: one must not undo another's changes.
        gate: Guards `calls` and `parked`; held while the model is changed, so that no call begins.
        calls: Number of calls in progress, which have read weights and captured steps that a change would replace.
        memories: The keys and values that were computed with it.
        parked: The memory that was released while the engines on the model sleep; None while they are awake.
        written: Number of times that its weights were written, or stored keys and values became wrong in another way.
        moved: Number of times that its weights or `memories` have moved to other addresses.
        drafters: Number of times that a drafter for it was exchanged.
    """

    def __init__(self) -> None:
        self.lock, self.gate, self.calls = threading.RLock(), threading.RLock(), 0
        self.memories: WeakSet[StoredTexts] = WeakSet()
        self.parked: ParkedMemory | None = None
        self.written = self.moved = self.drafters = 0

    @staticmethod
    def of_model(model: nn.Module) -> "SharedModel":
        """Return the state of a model, always the same object."""
        return _SHARED.setdefault(model, SharedModel())


_SHARED: WeakKeyDictionary[nn.Module, SharedModel] = WeakKeyDictionary()
