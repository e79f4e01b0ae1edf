"""Running batches that no call uses now, kept with their captured steps for later calls."""

import threading
from collections import defaultdict
from weakref import WeakKeyDictionary

from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.cuda_graphs import CUDAGraphRunner, bucket
from redrafter.scheduler.row_caches import DenseRows, PagedRows
from redrafter.scheduler.row_sampling import CallSampling
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.target.target import Target

__all__ = ["IdleBatches"]

Key = tuple[object, ...]


class IdleBatches:
    """Gives each call a running batch of its own, if possible one that an earlier call has left.

    Calls share batches where they differ in nothing but the numbers of their rows, which are loaded. A batch whose
    steps run code on the host is made for one call alone, as is a dense cache, which is as large as its texts.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[Key, list[RunningBatch]] = defaultdict(list)
        self._keys: WeakKeyDictionary[RunningBatch, Key] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def take(
        self,
        target: Target,
        graphs: CUDAGraphRunner | None,
        sampler: Sampler,
        rows: int,
        draft_model: Target | None,
        vocabulary: VocabularyMap | None,
        max_batch_size: int,
    ) -> RunningBatch:
        """Return an empty running batch.

        Args:
            target: The model that verifies.
            graphs: Captured steps and paged cache; None for a dense cache.
            sampler: How the rows of the call draw.
            rows: Most rows at once.
            draft_model: The model that drafts, or None.
            vocabulary: What that model has for each of the target's tokens; None where its ids are the target's.
            max_batch_size: Most rows at once of later calls.
        """
        if graphs is None:
            dense = DenseRows(target, draft_model, rows)
            return RunningBatch(target, CallSampling(sampler, rows), rows, dense)
        graphs.check_adapters()
        # Settings that are as large as the vocabulary are held for no more rows than needed.
        capacity = bucket(max(rows, max_batch_size) if all(x.dim() == 1 for x in sampler.tensors()) else rows)
        key = (sampler.kind, capacity, draft_model is not None)
        with self._lock:
            batch = self._idle[key].pop() if sampler.capturable and self._idle[key] else None
        if batch is None:
            caches = PagedRows(graphs, draft_model is not None, vocabulary)
            batch = RunningBatch(target, CallSampling(sampler, capacity), capacity, caches, graphs)
        assert isinstance(batch.sampling, CallSampling)
        batch.sampling.begin(sampler)
        if sampler.capturable:
            self._keys[batch] = key
        return batch

    def keep(self, batch: RunningBatch) -> None:
        """Keep a batch whose call has ended, if later calls may use it."""
        key = self._keys.get(batch)
        if key is not None:
            with self._lock:
                self._idle[key].append(batch)

    def drop(self) -> None:
        """Forget all idle batches and their captured steps, so that their GPU memory can be freed."""
        with self._lock:
            self._idle.clear()

    @property
    def idle(self) -> list[RunningBatch]:
        """The batches that no call uses now."""
        with self._lock:
            return [batch for batches in self._idle.values() for batch in batches]
