"""Running batches that no call uses, kept with their captured steps for later calls."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.captured_step import bucket
from redrafter.scheduler.engine_change import Models
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.row_caches import DenseRows, PagedRows
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sampling_tensors import SamplingTensors

Key = tuple[int, bool]  # its capacity, and whether it has rows of a draft model
MAX_IDLE_BYTES = 1 << 30  # total memory of idle batches, as counted by `RunningBatch.num_bytes`


class IdleBatches:
    """Lends each call a running batch, if possible one that an earlier call has released.

    A batch serves calls of any parameters, which are loaded into it. A batch whose steps run code on the host serves
    one call only, as does a dense cache, which is as large as its sequences. If idle batches hold more than
    `MAX_IDLE_BYTES`, the least recently used are dropped with their captured steps.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[Key, RunningBatch]] = []  # the one used last at the end
        self._lock = threading.Lock()

    @contextmanager
    def lent(
        self,
        models: Models,
        memory: PagedMemory | None,
        params: Sequence[SamplingParams],
        max_batch_size: int,
        *,
        speculate: bool,
    ) -> Iterator[RunningBatch]:
        """Yield an empty running batch for rows with these parameters, at most `max_batch_size` of them at once.

        Without `memory` it has a dense cache. Later calls may reuse it, unless an exception ends the context.
        """
        target = models.target
        draft_model = models.draft_model if speculate else None
        rows = min(len(params), max_batch_size)

        def make(size: int, caches: PagedRows | DenseRows) -> RunningBatch:
            sampling = SamplingTensors(size, target.vocab_size, target.device, of_call=True, ranks=target.ranks)
            return RunningBatch(target, sampling, size, caches, memory)

        if memory is None:
            yield make(rows, DenseRows(target, draft_model, rows))
            return
        # Tables as large as the vocabulary are allocated for no more rows than needed.
        capacity = bucket(rows if any(each.has_tables for each in params) else max(rows, max_batch_size))
        key = capacity, draft_model is not None
        kept = not any(each.asks_host for each in params)
        with self._lock:
            outdated = [entry for entry in self._idle if entry[1].outdated]
            self._idle = [entry for entry in self._idle if entry not in outdated]
            found = [at for at, (known, _) in enumerate(self._idle) if known == key] if kept else []
            batch = self._idle.pop(found[-1])[1] if found else None
        # Freed outside this lock, as freeing takes the memory's lock and waits for the device.
        for _, old in outdated:
            old.free()
        if batch is None:
            vocabulary = models.draft_vocabulary if speculate else None
            batch = make(capacity, PagedRows(memory, draft_model is not None, vocabulary))
        yield batch
        # Host processors hold the state of their sequences, so their batches serve only one call.
        if kept:
            with self._lock:
                self._idle.append((key, batch))
            self._shrink(MAX_IDLE_BYTES)

    def drop(self) -> None:
        """Drop all idle batches and their captured steps, so that their GPU memory can be freed."""
        self._shrink(-1)

    def _shrink(self, most: int) -> None:
        with self._lock:
            sizes = [batch.num_bytes for _, batch in self._idle]
            count = next((n for n in range(len(sizes)) if sum(sizes[n:]) <= most), len(sizes))
            given_up, self._idle = self._idle[:count], self._idle[count:]
        for _, batch in given_up:
            batch.free()

    @property
    def idle(self) -> list[RunningBatch]:
        """The batches that no call uses."""
        with self._lock:
            return [batch for _, batch in self._idle]
