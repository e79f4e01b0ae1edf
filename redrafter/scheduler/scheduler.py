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
from redrafter.scheduler.logprobs import LEAST, score
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
        self.batch = RunningBatch(engine, graphs, limits.max_batch_size, speculate)
        known = [
            limits.max_seq_len,
            engine.target.steady_context,
            (graphs.store.count - 1) * BLOCK_SIZE - self.batch.overshoot,
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
        return not self._queue and not self._cancelled and not self._reading and not self.batch.sequences

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._reading) + len(self.batch.sequences)

    def submit(self, *sequences: TokenSequence) -> None:
        """Let the texts of one client wait for their turn, all or none of them.

        Raises:
            QueueFullError: As many wait as may, see `Limits.refuse_if_full`.
            ArgumentError: One of them can never be served.
        """
        if not sequences:
            return
        check(sequences, self.longest, self.engine.target.vocab_size)
        for sequence in sequences:
            sequence.max_new_tokens = min(sequence.max_new_tokens, self.longest - len(sequence.prompt))
            sequence.stats = Stats(accepted_by_depth=[0] * self.batch.depth)
        with self._lock:
            self.limits.refuse_if_full(self._queue, self.running, sequences[0].client, len(sequences))
            for sequence in sequences:
                self._came += 1
                sequence.arrival = self._came
                self._queue.add(sequence)

    def cancel(self, *sequences: TokenSequence) -> None:
        """Stop texts before their next step. Those that have ended, or were never submitted, are left as they are."""
        with self._lock:
            for sequence in sequences:
                if sequence.ended or sequence.cancelled or not sequence.arrival:
                    continue
                sequence.cancelled = True
                if sequence in self._queue:
                    self._queue.remove(sequence)
                    self._cancelled.append(sequence)
                else:
                    self._cancelled.appendleft(sequence)

    def cancel_all(self) -> None:
        """Stop every text that waits or runs; in the thread of the rounds."""
        with self._lock:
            waiting = self._queue.clear()
            for sequence in waiting:
                sequence.cancelled = True
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
            for sequence in self._placed:  # none of them can be trusted any more
                self._end(sequence, SequenceDelta((), finish="error", error=error), keep=False)

    @property
    def _placed(self) -> tuple[TokenSequence, ...]:
        """The texts that hold a place, each once: one is in both where adding its row failed."""
        return tuple(dict.fromkeys((*self.batch.sequences, *self._reading)))

    def _end_cancelled(self) -> None:
        for _ in range(min(len(self._cancelled), CANCELLED)):
            sequence = self._cancelled.popleft()
            if not sequence.ended:
                self._end(sequence, SequenceDelta((), finish="cancelled"))

    def _admit(self) -> None:
        """Give places and blocks to those whose turn it is, as many as there is room for."""
        while True:
            with self._lock:
                sequence = self._queue.first()
                placeless = sequence is not None and not self._queue.running(sequence.client)
            if sequence is None:
                return
            if self.running >= self.limits.max_batch_size and not (placeless and self._free_a_place()):
                return
            with self._lock:
                if sequence not in self._queue:
                    continue  # it was cancelled meanwhile
                self._queue.start(sequence)
                self._reading[sequence] = None
            if not self._lease(sequence, placeless):
                with self._lock:
                    del self._reading[sequence]
                    self._queue.put_back(sequence)
                return

    def _lease(self, sequence: TokenSequence, placeless: bool) -> bool:
        """Give blocks to a text that was given a place. Tells whether there were enough."""
        turn, sequence.admitted_round = sequence.admitted_round, self._rounds
        slots = (
            sequence.max_length if self.limits.guaranteed_no_evict else sequence.prefill_length + 1
        ) + self.batch.overshoot
        text = sequence.tokens[: sequence.prefill_length]
        reuse = self.limits.reuse and not sequence.needs_scores  # what is found in the cache has no logits
        while sequence.block_table is None:
            try:
                with self.graphs.lock:
                    sequence.block_table = self.graphs.blocks.admit(text, slots, reuse, sequence.cache_salt)
            except CacheFullError as error:
                if self.running == 1:  # it would not fit into an empty cache either
                    self._end(sequence, SequenceDelta((), finish="error", error=error))
                    return True
                if not (placeless and self._free_a_place(slots)):
                    sequence.admitted_round = turn
                    return False
        if sequence.needs_scores:
            sequence.prompt_scores.clear()  # it may have been put back halfway
        sequence.prefilled = sequence.block_table.reused
        sequence.reused = max(sequence.reused, sequence.prefilled)
        if turn is None:  # to read again what was put back is not the client's expense
            self._charge(sequence, sequence.prefill_length - sequence.prefilled)
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
            sequence
            for sequence in self._placed
            if sequence.block_table is not None
            and self._rounds - (sequence.admitted_round or 0) >= TURN
            and self._queue.running(sequence.client) > 1
        ]
        blocks = self.graphs.blocks.free + sum(
            len(sequence.block_table.blocks) for sequence in texts if sequence.block_table is not None
        )
        if not texts or blocks * BLOCK_SIZE < slots:
            return False
        self._put_back(self._newest(texts))
        return True

    def _newest(self, sequences: Sequence[TokenSequence]) -> TokenSequence:
        """Return the newest text of the client with most places. The oldest text of all is never it, unless alone."""
        return max(sequences, key=lambda sequence: (self._queue.running(sequence.client), sequence.arrival))

    def _read(self) -> None:
        """Read on in the prompts. Those that are scored are read apart from others, which need the logits of their last
        tokens alone."""
        most = self.limits.max_num_tokens - len(self.batch.sequences) * self.batch.nodes
        budget = max(min(most, self.pace.tokens) if self.limits.chunked else most, BLOCK_SIZE)
        kinds = [
            [sequence for sequence in self._reading if sequence.needs_scores is unscored] for unscored in (False, True)
        ]
        kinds = [sequences for sequences in kinds if sequences]
        for sequences in kinds:
            for chosen in choose(sequences, max(budget // len(kinds), BLOCK_SIZE), self._padded, self.limits.chunked):
                began = time.perf_counter()
                self._forward(chosen, max(share for _, share in chosen))
                if self.engine.target.device.type == "cuda":
                    torch.cuda.synchronize(self.engine.target.device)  # else only its launch is measured
                self.pace.measured(cost(chosen, self._padded), time.perf_counter() - began)

    def _forward(self, chosen: Sequence[tuple[TokenSequence, int]], longest: int) -> None:
        target, device = self.engine.target, self.engine.target.device
        sequences = [sequence for sequence, _ in chosen]
        width = max(sequence.prefilled + share for sequence, share in chosen) + 1
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, (sequence, share) in enumerate(chosen):
            tokens[row, : sequence.prefilled + share] = torch.tensor(sequence.tokens[: sequence.prefilled + share])
        start = torch.tensor([sequence.prefilled for sequence in sequences], device=device)
        upto = start + torch.tensor([share for _, share in chosen], device=device)
        leases = [sequence.block_table for sequence in sequences if sequence.block_table is not None]
        cache, tokens = PagedCache(self.graphs.store, table_of(leases, device)), tokens.to(device)
        draft_store = self.graphs.draft_store

        def show(row: int, first: int, logits: Tensor) -> None:
            sequence, count = sequences[row], sequences[row].params.prompt_logprobs
            assert count is not None
            following = list(sequence.prompt[first + 1 : first + 1 + len(logits)])
            sequence.prompt_scores.extend(score(logits, following, count))

        logits, hidden = read(
            tokens,
            upto,
            target,
            cache,
            start=start,
            new=longest,
            draft_model=self.engine.draft_model,
            draft_cache=None if draft_store is None else PagedCache(draft_store, cache.table),
            show=show if sequences[0].needs_scores else None,
        )
        for sequence, share in chosen:
            sequence.prefilled += share
        done = [row for row, sequence in enumerate(sequences) if sequence.prefilled == sequence.prefill_length]
        for row in done:
            self._publish(sequences[row], sequences[row].prefill_length)
        self._begin(
            [sequences[row] for row in done], tokens[done], upto[done], logits[done], hidden[done], cache.window
        )

    def _begin(
        self,
        sequences: Sequence[TokenSequence],
        tokens: Tensor,
        upto: Tensor,
        logits: Tensor,
        hidden: Tensor,
        window: int,
    ) -> None:
        """Admit the rows whose prompts are read.

        New ones draw their first token; a text that was begun has it, and where nothing is to follow, none is drawn.
        """
        for sequence in sequences:
            if not sequence.max_new_tokens:
                self._end(sequence, SequenceDelta((), finish="length"))
        new = [row for row, sequence in enumerate(sequences) if not sequence.written and not sequence.ended]
        if new:
            fresh = [sequences[row] for row in new]
            sampler = self.batch.sampler_of(fresh)
            state, drawn = first_draw(tokens[new], upto[new], logits[new], hidden[new], window, sampler)
            pending = state.pending[:, 0].tolist()
            for row, (sequence, token) in enumerate(zip(fresh, pending, strict=True)):
                self._take(sequence, [token], 0, drawn.logits[row] if sequence.params.logprobs is not None else None)
        for row, sequence in enumerate(sequences):
            if not sequence.ended:
                self.batch.add(sequence, hidden[row])
                del self._reading[sequence]

    def _make_room(self) -> None:
        """See that each row has blocks for its next step; where there are none, put the newest back."""
        for sequence in tuple(self.batch.sequences):
            while sequence.block_table is not None:
                needed = min(len(sequence.tokens), sequence.max_length) + self.batch.overshoot
                if needed <= len(sequence.block_table.blocks) * BLOCK_SIZE:
                    break
                try:
                    with self.graphs.lock:
                        self.graphs.blocks.grow(sequence.block_table, needed)
                    self.batch.extend(sequence)
                except CacheFullError as error:
                    if self.running == 1:
                        self._end(sequence, SequenceDelta((), finish="error", error=error))
                    else:
                        self._put_back(self._newest(self._placed))

    def _put_back(self, sequence: TokenSequence) -> None:
        """Let a row wait again. What it has read may be found in the cache when its turn comes, or is read anew."""
        self.preempted += 1
        self._leave(sequence, keep=True)
        with self._lock:
            self._queue.put_back(sequence)

    def _step(self) -> None:
        if not self.batch.sequences:
            return
        drawn, report = self.batch.step()
        sequences = tuple(self.batch.sequences)
        wanted = {}
        for place, (sequence, (*_, accepted)) in enumerate(zip(sequences, report, strict=False)):
            if sequence.params.logprobs is not None:
                wanted[place] = drawn.logits[place, drawn.path.nodes[place, : accepted + 1]]
        for place, (sequence, (*tokens, accepted)) in enumerate(zip(sequences, report, strict=False)):
            drafted = drawn.drafted if sequence.params.speculate else 0
            self._take(sequence, tokens[: accepted + 1], accepted, wanted.get(place), drafted)

    def _take(
        self, sequence: TokenSequence, tokens: list[int], accepted: int, logits: Tensor | None, drafted: int = 0
    ) -> None:
        """Write down what was drawn, up to where the text ends. logits: `[count, V]`. drafted: drafts verified."""
        new, ended = cut(tokens, sequence.max_new_tokens - sequence.written, sequence.params.stop_token_ids)
        finish: Finish | None = None
        if ended:
            finish = "stop" if new[-1] in sequence.params.stop_token_ids else "length"
        if sequence.find_stop is not None and (stop := sequence.find_stop(new)) is not None:
            new, finish = new[: stop + 1], "stop"
        sequence.tokens += new
        self._charge(sequence, len(new))
        accepted = min(accepted, len(new))
        if drafted:
            sequence.stats.count(drafted, accepted, len(new))
        if sequence.guide is not None and sequence.guide.error is not None:
            error = ArgumentError(sequence.guide.error)
            self._end(sequence, SequenceDelta(new, accepted, finish="error", error=error, drafted=drafted))
            return
        told = None if logits is None else _logprobs(logits, new, sequence.params.logprobs)
        delta = SequenceDelta(new, accepted, told, finish, drafted=drafted)
        if finish is None:
            sequence.sink(sequence, delta)
        else:
            self._end(sequence, delta)

    def _end(self, sequence: TokenSequence, delta: SequenceDelta, keep: bool = True) -> None:
        placed = sequence.row is not None or sequence in self._reading
        self._leave(sequence, keep)
        with self._lock:
            if placed:
                self._queue.end(sequence)
            elif sequence in self._queue:
                self._queue.remove(sequence)
            sequence.ended = True
        sequence.sink(sequence, delta)

    def _charge(self, sequence: TokenSequence, tokens: int) -> None:
        with self._lock:
            self._queue.charge(sequence, tokens)

    def _leave(self, sequence: TokenSequence, keep: bool) -> None:
        """Take a sequence's place and blocks. keep: its keys and values may be found again."""
        if sequence.block_table is not None:
            if keep:
                # The pending token is in no cache; the one before it, a draft model may have proposed and not read.
                unread = 1 if self.graphs.draft_store is None else 2
                written = len(sequence.tokens) - unread
                if self.graphs.draft_store is not None and not sequence.params.speculate:
                    written = min(written, len(sequence.prompt))  # the draft model may have read no more
                self._publish(sequence, sequence.prefilled if sequence.row is None else written)
            with self.graphs.lock:
                self.graphs.blocks.release(sequence.block_table)
            sequence.block_table = None
        if sequence.row is not None:
            self.batch.remove(sequence)
        self._reading.pop(sequence, None)
        sequence.prefilled = 0

    def _publish(self, sequence: TokenSequence, tokens: int) -> None:
        assert sequence.block_table is not None
        if self.limits.reuse and not (self.graphs.draft_store is not None and self.engine.draft_model is None):
            with self.graphs.lock:
                self.graphs.blocks.publish(sequence.block_table, sequence.tokens[:tokens])


def _logprobs(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[tuple[float, dict[int, float]]]:
    """Of each token its log-probability under the model itself, and the likeliest tokens' at its place."""
    scores = logits[: len(tokens)].float().log_softmax(dim=-1).clamp(min=LEAST)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(count or 1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    likeliest = [dict(zip(ids, values, strict=True)) if count else {} for ids, values in pairs]
    return list(zip(own, likeliest, strict=True))
