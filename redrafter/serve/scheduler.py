"""Continuous batching: who waits, who is read, who steps.

A round admits what there is room for, reads a chunk of the prompts that are not read yet, and then makes one step of
all rows. So a long prompt holds a running text up by a chunk, never by its whole length, and a text that ends makes
room in the next round. What a text becomes does not depend on any of that: draws are keyed by seed and position.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.blocks import BLOCK
from redrafter.captured import StepGraphs
from redrafter.engine import Engine
from redrafter.errors import ArgumentError, CacheFullError, ReDrafterError, UnsupportedError
from redrafter.outputs import Stats
from redrafter.paged import PagedCache, table_of
from redrafter.serve.job import Finish, Job, Piece
from redrafter.serve.rows import Rows
from redrafter.step import first_draw, read
from redrafter.stopping import cut

__all__ = ["Limits", "QueueFullError", "Scheduler"]

_LOG = logging.getLogger(__name__)

LEAST = -9999.0  # log-probability that is told, as OpenAI has it: -inf is no JSON


class QueueFullError(ReDrafterError):
    """As many requests wait as may."""


@dataclass(frozen=True)
class Limits:
    """What a server may take on.

    max_batch_size: rows that step at once. max_num_tokens: tokens of one forward, drafts and chunks of prompts.
    max_seq_len: of a text, prompt included; None: the model's context. max_queue_size: requests that wait, 0 for any
    number. guaranteed_no_evict: admit a request only where its longest text fits, so that none is ever put back.
    chunked: read long prompts in chunks. reuse: look for prefixes that are in the cache already.
    """

    max_batch_size: int = 32
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_queue_size: int = 0
    guaranteed_no_evict: bool = False
    chunked: bool = True
    reuse: bool = True


class Scheduler:
    """`submit` and `cancel` from any thread; `round` from one. Nobody else may decode on the same graphs."""

    def __init__(self, engine: Engine, graphs: StepGraphs, limits: Limits, speculate: bool = True):
        if engine.draft_model is not None and engine.draft_model.device != engine.target.device:
            raise UnsupportedError(
                f"the draft model is on {engine.draft_model.device} and the target on {engine.target.device}; a server "
                "needs both on one device"
            )
        reason = engine.target.unpaged or (engine.draft_model and engine.draft_model.unpaged)
        if reason:
            raise UnsupportedError(f"{engine.target.name} cannot be served on a paged cache: {reason}")
        self.engine, self.graphs, self.limits = engine, graphs, limits
        self.rows = Rows(engine, graphs, limits.max_batch_size, speculate)
        known = [limits.max_seq_len, engine.target.steady_context, (graphs.store.count - 1) * BLOCK - self.rows.room]
        self.longest = min(each for each in known if each is not None)
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()  # in the order of their coming; what was put back stands first
        self._reading: list[Job] = []
        self._came = self.preempted = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._reading and not self.rows.jobs

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self.rows.jobs)

    def submit(self, *jobs: Job) -> None:
        """Let jobs wait for their turn, all or none of them. Raises `QueueFullError`, and `ArgumentError` for what can
        never be served."""
        for job in jobs:
            self._check(job)
            job.room = min(job.room, self.longest - len(job.prompt))
            job.stats = Stats(accepted_by_depth=[0] * self.rows.depth)
        with self._lock:
            if self.limits.max_queue_size and len(self._waiting) + len(jobs) > self.limits.max_queue_size:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting, and {self.limits.max_queue_size} may")
            for job in jobs:
                self._came += 1
                job.order = self._came
                self._waiting.append(job)

    def _check(self, job: Job) -> None:
        if not job.prompt:
            raise ArgumentError("the prompt is empty")
        if len(job.prompt) >= self.longest:
            raise ArgumentError(f"the prompt has {len(job.prompt)} tokens, and a text may have {self.longest}")
        settings, known = job.settings, self.engine.target.vocab_size
        for token in (*job.prompt, *settings.ends, *settings.logit_bias):
            if not 0 <= token < known:
                raise ArgumentError(f"token id {token} is out of range: there are {known} ids")
        for name in ("top_k", "min_new_tokens", "seed"):
            if not 0 <= getattr(settings, name) < 1 << 62:
                raise ArgumentError(f"{name} must be from 0 to 2**62 - 1, got {getattr(settings, name)}")

    def cancel(self, job: Job) -> None:
        """Stop a job before its next step."""
        job.cancelled = True

    def round(self) -> None:
        """Admit, read a chunk, step."""
        self.read()
        self.step()

    @torch.inference_mode()
    def read(self) -> None:
        """The first half of a round, after which prompts that are read have their first token."""
        with self._lock:  # else one that comes now may spoil the look at who waits
            waiting = tuple(self._waiting)
        for job in (*self.rows.jobs, *self._reading, *waiting):
            if job.cancelled:
                self._end(job, Piece((), finish="cancelled"))
        self._guarded(self._admit, self._read)

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
            for job in (*self.rows.jobs, *self._reading):  # none of them can be trusted any more
                self._end(job, Piece((), finish="error", error=error), keep=False)

    def _admit(self) -> None:
        """Give blocks to those that came first, as many as there is room for."""
        while self._waiting and self.running < self.limits.max_batch_size:
            job = self._waiting[0]
            first = job.limit if self.limits.guaranteed_no_evict else job.to_read + 1
            text = job.text[: job.to_read]
            try:
                with self.graphs.lock:
                    job.lease = self.graphs.blocks.admit(text, first + self.rows.room, self.limits.reuse)
            except CacheFullError as error:
                if self.running:
                    return
                self._end(job, Piece((), finish="error", error=error))  # it would not fit into an empty cache either
                continue
            with self._lock:
                self._waiting.remove(job)
            job.read = job.lease.reused
            job.reused = max(job.reused, job.read)
            self._reading.append(job)

    def _read(self) -> None:
        """Read on in the prompts, those that were admitted first, until a forward is full."""
        room = self.limits.max_num_tokens - len(self.rows.jobs) * self.rows.nodes
        room = max(room, BLOCK)
        chosen: list[tuple[Job, int]] = []
        longest = 0
        for job in self._reading:
            left = job.to_read - job.read
            share = left if not self.limits.chunked else min(left, room)
            if chosen and max(longest, share) * (len(chosen) + 1) > room:
                break
            longest = max(longest, share)
            chosen.append((job, share))
        if chosen:
            self._forward(chosen, longest)

    def _forward(self, chosen: Sequence[tuple[Job, int]], longest: int) -> None:
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
        logits, hidden = read(
            tokens,
            upto,
            target,
            cache,
            start=start,
            new=longest,
            draft_model=self.engine.draft_model,
            draft_cache=None if draft_store is None else PagedCache(draft_store, cache.table),
        )
        for job, share in chosen:
            job.read += share
        done = [row for row, job in enumerate(jobs) if job.read == job.to_read]
        for row in done:
            self._publish(jobs[row], jobs[row].to_read)
        self._begin([jobs[row] for row in done], tokens[done], upto[done], logits[done], hidden[done], cache.window)

    def _begin(
        self, jobs: Sequence[Job], tokens: Tensor, upto: Tensor, logits: Tensor, hidden: Tensor, window: int
    ) -> None:
        """Rows whose prompts are read. New ones draw their first token; a text that was begun has it."""
        new = [row for row, job in enumerate(jobs) if not job.written]
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
                self._reading.remove(job)

    def _make_room(self) -> None:
        """See that each row has blocks for its next step; where there are none, put the newest back."""
        for job in tuple(self.rows.jobs):
            while job.lease is not None:
                needed = min(len(job.text), job.limit) + self.rows.room
                if needed <= len(job.lease.blocks) * BLOCK:
                    break
                try:
                    with self.graphs.lock:
                        self.graphs.blocks.grow(job.lease, needed)
                    self.rows.extend(job)
                except CacheFullError as error:
                    others = [*self.rows.jobs, *self._reading]
                    if len(others) == 1:
                        self._end(job, Piece((), finish="error", error=error))
                    else:
                        self._put_back(max(others, key=lambda each: each.order))

    def _put_back(self, job: Job) -> None:
        """Let a row wait again. What it has read may be found in the cache when its turn comes, or is read anew."""
        self.preempted += 1
        self._leave(job, keep=True)
        with self._lock:
            self._waiting.appendleft(job)

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

    def _take(self, job: Job, tokens: list[int], accepted: int, logits: Tensor | None, drafted: int = 0) -> None:
        """Write down what was drawn, up to where the text ends. logits: `[count, V]`. drafted: drafts verified."""
        new, ended = cut(tokens, job.room - job.written, job.settings.ends)
        finish: Finish | None = None
        if ended:
            finish = "stop" if new[-1] in job.settings.ends else "length"
        if job.stops is not None and (stop := job.stops(new)) is not None:
            new, finish = new[: stop + 1], "stop"
        job.text += new
        accepted = min(accepted, len(new))
        if drafted:
            job.stats.count(drafted, accepted, len(new))
        if job.guide is not None and job.guide.error is not None:
            error = ArgumentError(job.guide.error)
            self._end(job, Piece(new, accepted, finish="error", error=error, drafted=drafted))
            return
        told = None if logits is None else _logprobs(logits, new, job.settings.logprobs)
        piece = Piece(new, accepted, told, finish, drafted=drafted)
        if finish is None:
            job.sink(job, piece)
        else:
            self._end(job, piece)

    def _end(self, job: Job, piece: Piece, keep: bool = True) -> None:
        self._leave(job, keep)
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
        job.ended = True
        job.sink(job, piece)

    def _leave(self, job: Job, keep: bool) -> None:
        """Take a job's place and blocks. keep: its keys and values may be found again."""
        if job.lease is not None:
            if keep:
                # The pending token is in no cache; the one before it, a draft model may have proposed and not read.
                unread = 1 if self.graphs.draft_store is None else 2
                written = len(job.text) - unread
                if self.graphs.draft_store is not None and not job.settings.speculate:
                    written = len(job.prompt)  # the draft model may have read no more
                self._publish(job, job.read if job.place is None else min(written, len(job.text) - unread))
            with self.graphs.lock:
                self.graphs.blocks.release(job.lease)
            job.lease = None
        if job.place is not None:
            self.rows.remove(job)
        if job in self._reading:
            self._reading.remove(job)
        job.read = 0

    def _publish(self, job: Job, tokens: int) -> None:
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
