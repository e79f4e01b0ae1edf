"""Continuous batching: who waits, who is read, who steps.

A round admits what there is room for, reads a chunk of the prompts that are not read yet, and then makes one step of
all rows. So a long prompt holds a running text up by a chunk, never by its whole length, and a text that ends makes
room in the next round. What a text becomes does not depend on any of that: draws are keyed by seed and position.

Who is admitted next is decided by client (`waiting`), what a chunk holds by the time that chunks have taken (`pace`).
Where all places are taken, a client that has none is given that of another client's newest text, which goes on later
with the same tokens. No round looks at every text that waits, however many those are.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redrafter.cache.paged import PagedCache, table_of
from redrafter.engine.cuda_graphs import CUDAGraphRunner
from redrafter.engine.engine import Engine
from redrafter.engine.outputs import Stats
from redrafter.engine.stopping import cut
from redrafter.errors import ArgumentError, CacheFullError, UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler.limits import Limits, QueueFullError, check
from redrafter.scheduler.prefill_budget import Pace, choose, cost
from redrafter.scheduler.prompt_logprobs import LEAST, score
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.sequence import Finish, SequenceDelta, TokenSequence
from redrafter.scheduler.waiting_queue import WaitingQueue
from redrafter.step import first_draw, read

__all__ = ["Limits", "QueueFullError", "Scheduler"]

_LOG = logging.getLogger(__name__)

TURN = 16  # rounds for which a text keeps its place at least, however many clients have none
CANCELLED = 512  # cancelled texts that a round ends at most; telling of each takes some microseconds


class Scheduler:
    """`submit` and `cancel` from any thread; `round` from one. Nobody else may decode on the same graphs."""

    def __init__(self, engine: Engine, graphs: CUDAGraphRunner, limits: Limits, speculate: bool = True):
        if engine.draft_model is not None and engine.draft_model.device != engine.target.device:
            raise UnsupportedError(
                f"the draft model is on {engine.draft_model.device} and the target on {engine.target.device}; a server "
                "needs both on one device"
            )
        reason = engine.target.unpaged or (engine.draft_model and engine.draft_model.unpaged)
        if reason:
            raise UnsupportedError(f"{engine.target.name} cannot be served on a paged cache: {reason}")
        self.engine, self.graphs, self.limits = engine, graphs, limits
        self.rows = RunningBatch(engine, graphs, limits.max_batch_size, speculate)
        known = [
            limits.max_seq_len,
            engine.target.steady_context,
            (graphs.store.count - 1) * BLOCK_SIZE - self.rows.room,
        ]
        self.longest = min(each for each in known if each is not None)
        self._lock = threading.Lock()  # of who waits, and of who was cancelled
        self._queue = WaitingQueue()
        self._cancelled: deque[TokenSequence] = deque()  # not ended yet; those with a place stand first
        self._reading: dict[TokenSequence, None] = {}  # in the order of their admission
        self._padded = engine.target.device.type != "cpu"
        self.pace = Pace(limits.max_num_tokens)
        self._came = self._rounds = self.preempted = 0

    @property
    def idle(self) -> bool:
        return not self._queue and not self._cancelled and not self._reading and not self.rows.jobs

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self.rows.jobs)

    def submit(self, *jobs: TokenSequence) -> None:
        """Let the texts of one client wait for their turn, all or none of them.

        Raises:
            QueueFullError: As many wait as may, see `Limits.refuse_if_full`.
            ArgumentError: One of them can never be served.
        """
        if not jobs:
            return
        check(jobs, self.longest, self.engine.target.vocab_size)
        for job in jobs:
            job.room = min(job.room, self.longest - len(job.prompt))
            job.stats = Stats(accepted_by_depth=[0] * self.rows.depth)
        with self._lock:
            self.limits.refuse_if_full(self._queue, self.running, jobs[0].client, len(jobs))
            for job in jobs:
                self._came += 1
                job.order = self._came
                self._queue.add(job)

    def cancel(self, *jobs: TokenSequence) -> None:
        """Stop texts before their next step. Those that have ended, or were never submitted, are left as they are."""
        with self._lock:
            for job in jobs:
                if job.ended or job.cancelled or not job.order:
                    continue
                job.cancelled = True
                if job in self._queue:
                    self._queue.remove(job)
                    self._cancelled.append(job)
                else:
                    self._cancelled.appendleft(job)

    def cancel_all(self) -> None:
        """Stop every text that waits or runs; in the thread of the rounds."""
        with self._lock:
            waiting = self._queue.clear()
            for job in waiting:
                job.cancelled = True
            self._cancelled.extend(waiting)
        self.cancel(*self._placed)

    def round(self) -> None:
        """Admit, read a chunk, step."""
        self.read()
        self.step()

    @torch.inference_mode()
    def read(self) -> None:
        """The first half of a round, after which prompts that are read have their first token."""
        self._rounds += 1
        self._guarded(self._end_cancelled, self._admit, self._read)

    @torch.inference_mode()
    def step(self) -> None:
        """The second half: one step of all rows."""
        self._guarded(self._make_room, self._step)

    def _guarded(self, *parts: Callable[[], None]) -> None:
        try:
            for part in parts:
                part()
        except Exception as error:
            _LOG.exception("a round failed: %d requests are given up", self.running)
            for job in self._placed:  # none of them can be trusted any more
                self._end(job, SequenceDelta((), finish="error", error=error), keep=False)

    @property
    def _placed(self) -> tuple[TokenSequence, ...]:
        """The texts that hold a place, each once: one is in both where adding its row failed."""
        return tuple(dict.fromkeys((*self.rows.jobs, *self._reading)))

    def _end_cancelled(self) -> None:
        for _ in range(min(len(self._cancelled), CANCELLED)):
            job = self._cancelled.popleft()
            if not job.ended:
                self._end(job, SequenceDelta((), finish="cancelled"))

    def _admit(self) -> None:
        """Give places and blocks to those whose turn it is, as many as there is room for."""
        while True:
            with self._lock:
                job = self._queue.first()
                placeless = job is not None and not self._queue.running(job.client)
            if job is None:
                return
            if self.running >= self.limits.max_batch_size and not (placeless and self._free_a_place()):
                return
            with self._lock:
                if job not in self._queue:
                    continue  # it was cancelled meanwhile
                self._queue.start(job)
                self._reading[job] = None
            if not self._lease(job, placeless):
                with self._lock:
                    del self._reading[job]
                    self._queue.put_back(job)
                return

    def _lease(self, job: TokenSequence, placeless: bool) -> bool:
        """Give blocks to a text that was given a place. Tells whether there were enough."""
        turn, job.turn = job.turn, self._rounds
        slots = (job.limit if self.limits.guaranteed_no_evict else job.to_read + 1) + self.rows.room
        text = job.text[: job.to_read]
        reuse = self.limits.reuse and not job.unscored  # what is found in the cache has no logits
        while job.lease is None:
            try:
                with self.graphs.lock:
                    job.lease = self.graphs.blocks.admit(text, slots, reuse, job.salt)
            except CacheFullError as error:
                if self.running == 1:  # it would not fit into an empty cache either
                    self._end(job, SequenceDelta((), finish="error", error=error))
                    return True
                if not (placeless and self._free_a_place(slots)):
                    job.turn = turn
                    return False
        if job.unscored:
            job.prompt_scores.clear()  # it may have been put back halfway
        job.read = job.lease.reused
        job.reused = max(job.reused, job.read)
        if turn is None:  # to read again what was put back is not the client's expense
            self._charge(job, job.to_read - job.read)
        return True

    def _free_a_place(self, slots: int = 0) -> bool:
        """Put back a text for a client without any place. Tells whether there was one to put back.

        It is the newest text of the client that has most places, never a client's only one, and none that has had its
        place for less than `TURN` rounds: so each text gets on by some tokens whenever it has a place.

        Args:
            slots: What the client's text needs; where all such texts together hold less, none is put back.
        """
        if self.limits.guaranteed_no_evict:
            return False
        texts = [
            job
            for job in self._placed
            if job.lease is not None and self._rounds - (job.turn or 0) >= TURN and self._queue.running(job.client) > 1
        ]
        blocks = self.graphs.blocks.free + sum(len(job.lease.blocks) for job in texts if job.lease is not None)
        if not texts or blocks * BLOCK_SIZE < slots:
            return False
        self._put_back(self._newest(texts))
        return True

    def _newest(self, jobs: Sequence[TokenSequence]) -> TokenSequence:
        """Return the newest text of the client with most places. The oldest text of all is never it, unless alone."""
        return max(jobs, key=lambda job: (self._queue.running(job.client), job.order))

    def _read(self) -> None:
        """Read on in the prompts. Those that are scored are read apart from others, which need the logits of their last
        tokens alone."""
        most = self.limits.max_num_tokens - len(self.rows.jobs) * self.rows.nodes
        budget = max(min(most, self.pace.tokens) if self.limits.chunked else most, BLOCK_SIZE)
        kinds = [[job for job in self._reading if job.unscored is unscored] for unscored in (False, True)]
        kinds = [jobs for jobs in kinds if jobs]
        for jobs in kinds:
            for chosen in choose(jobs, max(budget // len(kinds), BLOCK_SIZE), self._padded, self.limits.chunked):
                began = time.perf_counter()
                self._forward(chosen, max(share for _, share in chosen))
                if self.engine.target.device.type == "cuda":
                    torch.cuda.synchronize(self.engine.target.device)  # else only its launch is measured
                self.pace.measured(cost(chosen, self._padded), time.perf_counter() - began)

    def _forward(self, chosen: Sequence[tuple[TokenSequence, int]], longest: int) -> None:
        target, device = self.engine.target, self.engine.target.device
        jobs = [job for job, _ in chosen]
        width = max(job.read + share for job, share in chosen) + 1
        tokens = torch.zeros(len(jobs), width, dtype=torch.long)
        for row, (job, share) in enumerate(chosen):
            tokens[row, : job.read + share] = torch.tensor(job.text[: job.read + share])
        start = torch.tensor([job.read for job in jobs], device=device)
        upto = start + torch.tensor([share for _, share in chosen], device=device)
        leases = [job.lease for job in jobs if job.lease is not None]
        cache, tokens = PagedCache(self.graphs.store, table_of(leases, device)), tokens.to(device)
        draft_store = self.graphs.draft_store

        def show(row: int, first: int, logits: Tensor) -> None:
            job, count = jobs[row], jobs[row].settings.prompt_logprobs
            assert count is not None
            following = list(job.prompt[first + 1 : first + 1 + len(logits)])
            job.prompt_scores.extend(score(logits, following, count))

        logits, hidden = read(
            tokens,
            upto,
            target,
            cache,
            start=start,
            new=longest,
            draft_model=self.engine.draft_model,
            draft_cache=None if draft_store is None else PagedCache(draft_store, cache.table),
            show=show if jobs[0].unscored else None,
        )
        for job, share in chosen:
            job.read += share
        done = [row for row, job in enumerate(jobs) if job.read == job.to_read]
        for row in done:
            self._publish(jobs[row], jobs[row].to_read)
        self._begin([jobs[row] for row in done], tokens[done], upto[done], logits[done], hidden[done], cache.window)

    def _begin(
        self, jobs: Sequence[TokenSequence], tokens: Tensor, upto: Tensor, logits: Tensor, hidden: Tensor, window: int
    ) -> None:
        """Admit the rows whose prompts are read.

        New ones draw their first token; a text that was begun has it, and where nothing is to follow, none is drawn.
        """
        for job in jobs:
            if not job.room:
                self._end(job, SequenceDelta((), finish="length"))
        new = [row for row, job in enumerate(jobs) if not job.written and not job.ended]
        if new:
            fresh = [jobs[row] for row in new]
            sampler = self.rows.sampler_of(fresh)
            state, drawn = first_draw(tokens[new], upto[new], logits[new], hidden[new], window, sampler)
            pending = state.pending[:, 0].tolist()
            for row, (job, token) in enumerate(zip(fresh, pending, strict=True)):
                self._take(job, [token], 0, drawn.logits[row] if job.settings.logprobs is not None else None)
        for row, job in enumerate(jobs):
            if not job.ended:
                self.rows.add(job, hidden[row])
                del self._reading[job]

    def _make_room(self) -> None:
        """See that each row has blocks for its next step; where there are none, put the newest back."""
        for job in tuple(self.rows.jobs):
            while job.lease is not None:
                needed = min(len(job.text), job.limit) + self.rows.room
                if needed <= len(job.lease.blocks) * BLOCK_SIZE:
                    break
                try:
                    with self.graphs.lock:
                        self.graphs.blocks.grow(job.lease, needed)
                    self.rows.extend(job)
                except CacheFullError as error:
                    if self.running == 1:
                        self._end(job, SequenceDelta((), finish="error", error=error))
                    else:
                        self._put_back(self._newest(self._placed))

    def _put_back(self, job: TokenSequence) -> None:
        """Let a row wait again. What it has read may be found in the cache when its turn comes, or is read anew."""
        self.preempted += 1
        self._leave(job, keep=True)
        with self._lock:
            self._queue.put_back(job)

    def _step(self) -> None:
        if not self.rows.jobs:
            return
        drawn, report = self.rows.step()
        jobs = tuple(self.rows.jobs)
        wanted = {}
        for place, (job, (*_, accepted)) in enumerate(zip(jobs, report, strict=False)):
            if job.settings.logprobs is not None:
                wanted[place] = drawn.logits[place, drawn.path.nodes[place, : accepted + 1]]
        for place, (job, (*tokens, accepted)) in enumerate(zip(jobs, report, strict=False)):
            drafted = drawn.drafted if job.settings.speculate else 0
            self._take(job, tokens[: accepted + 1], accepted, wanted.get(place), drafted)

    def _take(
        self, job: TokenSequence, tokens: list[int], accepted: int, logits: Tensor | None, drafted: int = 0
    ) -> None:
        """Write down what was drawn, up to where the text ends. logits: `[count, V]`. drafted: drafts verified."""
        new, ended = cut(tokens, job.room - job.written, job.settings.ends)
        finish: Finish | None = None
        if ended:
            finish = "stop" if new[-1] in job.settings.ends else "length"
        if job.stops is not None and (stop := job.stops(new)) is not None:
            new, finish = new[: stop + 1], "stop"
        job.text += new
        self._charge(job, len(new))
        accepted = min(accepted, len(new))
        if drafted:
            job.stats.count(drafted, accepted, len(new))
        if job.guide is not None and job.guide.error is not None:
            error = ArgumentError(job.guide.error)
            self._end(job, SequenceDelta(new, accepted, finish="error", error=error, drafted=drafted))
            return
        told = None if logits is None else _logprobs(logits, new, job.settings.logprobs)
        piece = SequenceDelta(new, accepted, told, finish, drafted=drafted)
        if finish is None:
            job.sink(job, piece)
        else:
            self._end(job, piece)

    def _end(self, job: TokenSequence, piece: SequenceDelta, keep: bool = True) -> None:
        placed = job.place is not None or job in self._reading
        self._leave(job, keep)
        with self._lock:
            if placed:
                self._queue.end(job)
            elif job in self._queue:
                self._queue.remove(job)
            job.ended = True
        job.sink(job, piece)

    def _charge(self, job: TokenSequence, tokens: int) -> None:
        with self._lock:
            self._queue.charge(job, tokens)

    def _leave(self, job: TokenSequence, keep: bool) -> None:
        """Take a job's place and blocks. keep: its keys and values may be found again."""
        if job.lease is not None:
            if keep:
                # The pending token is in no cache; the one before it, a draft model may have proposed and not read.
                unread = 1 if self.graphs.draft_store is None else 2
                written = len(job.text) - unread
                if self.graphs.draft_store is not None and not job.settings.speculate:
                    written = min(written, len(job.prompt))  # the draft model may have read no more
                self._publish(job, job.read if job.place is None else written)
            with self.graphs.lock:
                self.graphs.blocks.release(job.lease)
            job.lease = None
        if job.place is not None:
            self.rows.remove(job)
        self._reading.pop(job, None)
        job.read = 0

    def _publish(self, job: TokenSequence, tokens: int) -> None:
        assert job.lease is not None
        if self.limits.reuse and not (self.graphs.draft_store is not None and self.engine.draft_model is None):
            with self.graphs.lock:
                self.graphs.blocks.publish(job.lease, job.text[:tokens])


def _logprobs(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[tuple[float, dict[int, float]]]:
    """Of each token its log-probability under the model itself, and the likeliest tokens' at its place."""
    scores = logits[: len(tokens)].float().log_softmax(dim=-1).clamp(min=LEAST)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(count or 1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    likeliest = [dict(zip(ids, values, strict=True)) if count else {} for ids, values in pairs]
    return list(zip(own, likeliest, strict=True))
