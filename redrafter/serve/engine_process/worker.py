"""The thread that runs the scheduler, and sends the output of each half of a round as one message."""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeAlias

import psutil

from redrafter.cache.to_device import on_device
from redrafter.checkpoints.adapters import read_adapter
from redrafter.engine.changes import ChangeDrafter, Sleep, UpdateWeights, Wake
from redrafter.engine.engine import Engine
from redrafter.errors import ReDrafterError, ends_device, first_line
from redrafter.grammar.grammar import Grammar
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.images import ImageInputs
from redrafter.scheduler.engine_change import EngineChange
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.request import GenerationRequest
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.serve.engine_process import messages
from redrafter.serve.engine_process.engine import ServedEngine
from redrafter.serve.engine_process.start import LoadEngine

_LOG = logging.getLogger(__name__)
# Called with the error of a change, or None and the names of tensors that it has written with NaN or infinite values
Done: TypeAlias = Callable[[ReDrafterError | None, Sequence[str]], object]
# What makes the changes that operators ask for, of the engine and a path or None.
CHANGES: dict[str, Callable[[Engine, str | None], EngineChange]] = {
    "sleep": lambda engine, _: Sleep(engine),
    "wake": lambda engine, _: Wake(engine),
    "update_weights": lambda engine, path: UpdateWeights(engine, path or ""),
    "update_weights_not_finite": lambda engine, path: UpdateWeights(engine, path or "", allow_not_finite=True),
    "change_drafter": ChangeDrafter,
}
MAX_FAILED_ROUNDS = 8  # in a row without a token written: the cause then affects every round
STOP_SECONDS = 10.0  # time limit of `stop` for the current round
IDLE_SECONDS = 5.0  # interval of messages to idle ranks, well below their timeout
ENDED_SECONDS = 0.2  # time for a process to end after its connections close
WATCH_SECONDS = 1.0  # interval at which the processes of other ranks are checked
# Time for which a rank is lost before the rounds are given up: most rounds fail by themselves in less.
LOST_SECONDS = 8.0


class Worker:
    """Runs a scheduler's rounds in a separate thread while there is work. No other thread may run rounds."""

    def __init__(self, scheduler: Scheduler, send: Callable[[messages.Written], object], on_end: Callable[[], object]):
        """Create a worker without starting it. Both functions are called in its thread.

        `send` receives the output of half a round and must not block; `on_end` is called after a stop or a failure.
        """
        self.scheduler, self._send, self._on_end = scheduler, send, on_end
        self.failure: str | None = None  # short reason for which the rounds failed
        self.halves = 0  # halves of rounds that have ended
        self._work = threading.Event()
        self._sequences: dict[int, TokenSequence] = {}  # sequences that have not ended, by number
        self._deltas: list[tuple[int, SequenceDelta]] = []  # not sent yet
        self._prompts: dict[int, tuple[int, float | None, list[PromptScore]]] = {}  # prompts' facts to send, by number
        self._reused: dict[int, int] = {}  # reused prompt tokens as last sent, by number
        self._load = messages.EngineLoad()  # as last sent
        self._changes: deque[tuple[EngineChange, Done]] = deque()  # pending changes
        self._drafter = 0  # how often the drafter was changed
        self._given_up: set[str] = set()  # ids of requests that an error ended and that are not logged yet
        self._wrote = False  # whether this round has drawn a token
        self._failed = False  # whether this round has failed
        self._failed_rounds = 0  # in a row
        self._broken: Exception | None = None  # error of other work that left the device unusable
        self._stopping = False
        scheduler.on_failure = self._round_failed
        self._thread = threading.Thread(target=self._run, name="redrafter-engine", daemon=True)

    @property
    def idle(self) -> bool:
        """Return whether there is no round to run."""
        return self.scheduler.idle

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel all sequences, and wait for the current round to end."""
        self._stopping = True
        self._work.set()
        self._thread.join(timeout=STOP_SECONDS)

    def fail(self, error: Exception) -> None:
        """Stop the rounds because of an error of other work on the device. May be called from any thread."""
        self._broken = error
        self._work.set()

    def submit(self, request: messages.Submit, grammar: Grammar | None) -> None:
        """Queue the sequences of a request with its compiled grammar.

        Raises:
            QueueFullError: Too many sequences are waiting.
            ArgumentError: A prompt can never be served, or the adapter was unloaded meanwhile.
        """
        images = None if request.images is None else ImageInputs(request.images)
        adapters = self.scheduler.engine.target.adapters
        # Held before anything else, so that it cannot be unloaded between the check and the first step.
        adapter = None if request.adapter is None else adapters.hold(request.adapter, len(request.numbers))
        try:
            longest, sequences = self.scheduler.longest, dict[int, TokenSequence]()
            for index, (number, prompt) in enumerate(zip(request.numbers, request.prompts, strict=True)):
                new, queued = min(request.max_new_tokens, longest - len(prompt)), (request.client, request.priority)
                # Each sequence of a request draws from its own stream of random numbers.
                params = replace(request.params, seed=request.params.seed + index, grammar=grammar)
                asked = GenerationRequest(prompt, new, params, *queued, request.cache_salt, adapter, images=images)
                sequences[number] = TokenSequence(asked, partial(self._write, number, request.request_id))
            self._sequences.update(sequences)  # registered first, since a delta may arrive before `submit` returns
            self.scheduler.submit(*sequences.values())
        except Exception:
            for number in request.numbers:
                self._sequences.pop(number, None)
            if adapter is not None:
                adapters.release(adapter, len(request.numbers))
            raise
        self._work.set()

    def change(self, message: messages.ChangeAdapters | messages.ChangeEngine, done: Done) -> None:
        """Change the adapters in this thread, or prepare another change here and queue it to be applied between rounds.

        Args:
            message: The change.
            done: Called once the change is applied or refused, in this or the rounds' thread.

        Raises:
            ReDrafterError: The change is not possible, or the adapter does not exist.
        """
        engine = self.scheduler.engine
        assert isinstance(engine, Engine), "what is served is an engine"
        if isinstance(message, messages.ChangeEngine):
            self._changes.append((CHANGES[message.kind](engine, message.path), done))
            self._work.set()
            return
        if message.path is None:
            engine.unload_adapter(message.name)
        else:
            read = partial(read_adapter, message.path)
            weights = engine.target.ranks.together(read)  # before locking: the lock blocks steps
            with self.scheduler.memory.lock:  # other work on the device would abort a capture
                engine.load_adapter(message.name, weights)
        done(None, ())

    def cancel(self, numbers: Iterable[int]) -> None:
        """End the sequences with these numbers before their next step; ended sequences are ignored."""
        sequences = map(self._sequences.get, numbers)
        self.scheduler.cancel(*(sequence for sequence in sequences if sequence is not None))
        self._work.set()

    def _write(self, number: int, request_id: str, sequence: TokenSequence, delta: SequenceDelta) -> None:
        if self._reused.get(number) != sequence.reused:  # it may grow when a preempted sequence resumes
            scores = [] if number in self._reused else sequence.prompt_scores
            self._prompts[number] = sequence.reused, sequence.admission.queued, scores
            self._reused[number] = sequence.reused
        if delta.error is not None and not isinstance(delta.error, ReDrafterError):  # its message is only logged
            self._given_up.add(request_id)
            what = f"the engine failed while it wrote this answer; its log has the reason under the id {request_id}"
            delta = replace(delta, error=messages.EngineError(what))
        self._wrote |= bool(delta.tokens)
        self._deltas.append((number, delta))
        if delta.finish is not None:
            del self._sequences[number], self._reused[number]
            if (adapter := sequence.request.adapter) is not None:
                self.scheduler.engine.target.adapters.release(adapter)

    def _run(self) -> None:
        with on_device(self.scheduler.engine.target.device):
            self._run_rounds()

    def _run_rounds(self) -> None:
        try:
            while self._continues():
                if self._broken is not None:
                    raise self._broken
                self._make_changes()
                if not self.scheduler.idle:
                    self._run_round()
                elif not self._rests:
                    self._work_ahead()
            self.scheduler.asleep = False  # waiting sequences must receive their end
            while not self.scheduler.idle:
                self.scheduler.cancel_all()
                self.scheduler.prefill()
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self.failure = self._explain(error)
        finally:  # a reader must not wait for a thread that has ended
            self._on_end()

    def _run_round(self) -> None:
        self._wrote = self._failed = False
        self.scheduler.prefill()
        self._report()  # send first tokens of prefills without waiting for the step
        self.halves += 1
        self.scheduler.step()
        self.halves += 1
        if self._wrote and not self._failed:  # a round that only reads part of a prompt proves nothing
            self._failed_rounds = 0
        self._report()

    @property
    def _rests(self) -> bool:
        """Return whether there is nothing to do before the next message."""
        return self.scheduler.idle and (self.scheduler.asleep or not self.scheduler.later)

    def _work_ahead(self) -> None:
        """Do one piece of work that later rounds would have to wait for."""
        try:
            self.scheduler.later.popleft()()
        except ReDrafterError as error:  # the queue is full meanwhile, or an adapter was unloaded
            if ends_device(error):
                raise
            _LOG.debug("work ahead of requests is left out: %s", first_line(error))
        self._report()  # tokens of sequences that came meanwhile

    def _round_failed(self, error: Exception, count: int) -> None:
        """Log an error that ended sequences; raise it, which ends the engine, if later rounds would fail too."""
        if not isinstance(error, ReDrafterError):
            # A round may report several failures, but counts once.
            self._failed_rounds += not self._failed
            self._failed = True
        if ends_device(error) or self._failed_rounds >= MAX_FAILED_ROUNDS:
            raise error
        requests = ", of the requests " + ", ".join(sorted(self._given_up)) if self._given_up else ""
        self._given_up.clear()
        _LOG.error("a round failed: %d sequences are given up%s", count, requests, exc_info=error)

    def _make_changes(self) -> None:
        while self._changes:
            change, done = self._changes.popleft()
            # The device must be idle and its tokens read before weights or caches change.
            self.scheduler.settle()
            self._report()  # earlier tokens count for the drafter that was active then
            error: ReDrafterError | None = None
            try:
                self.scheduler.change(change)
                self._drafter += isinstance(change, ChangeDrafter)
            except ReDrafterError as refusal:
                if ends_device(refusal):  # the refusal may have such an error as its cause
                    raise
                error = refusal
            self._report()
            done(error, () if error is not None else change.not_finite)

    def _explain(self, error: BaseException) -> str:
        times = f" in {self._failed_rounds} rounds in a row" if self._failed_rounds >= MAX_FAILED_ROUNDS else ""
        why = ", after which CUDA computes nothing in this process" if ends_device(error) else ""
        reason = f"the engine failed{times} ({type(error).__name__}){why}"
        _LOG.error("%s: nothing is served any more", reason, exc_info=error)
        return reason

    def _continues(self) -> bool:
        """Wait for work; return False if the rounds should stop."""
        if self._rests and not self._stopping:
            self._work.wait()
            self._work.clear()
        return not self._stopping

    def _report(self) -> None:
        scheduler, blocks = self.scheduler, self.scheduler.memory.blocks
        rows, used = scheduler.running_set, 1 - blocks.num_free_blocks / blocks.num_blocks
        cache = used, blocks.num_host_blocks, blocks.onboarded * BLOCK_SIZE
        load = messages.EngineLoad(rows.running, rows.waiting, rows.preempted, *cache, scheduler.asleep, self._drafter)
        # Rounds without news send nothing, since each message wakes the server.
        if self._deltas or load != self._load:
            self._send(messages.Written(self._deltas, self._prompts, load))
            self._deltas, self._prompts, self._load = [], {}, load


class SharedWorker(Worker):
    """Runs the rounds of a scheduler on one of several ranks.

    Before each round, rank 0 broadcasts the messages that have arrived since the last one. All ranks apply them in the
    same order and then make the same decisions, so that they launch the same forwards.

    A round may wait for ever for a rank that has ended or is stopped: on a GPU, inside a kernel. So a thread watches
    the processes of the other ranks on this machine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[messages.Written], object],
        on_end: Callable[[], object],
        refuse: Callable[[messages.Submit, Exception], object],
        give_up: Callable[[str], NoReturn],
    ):
        """Create a worker.

        `refuse` is called in its thread with a request that cannot be queued, and the error; `give_up` in another
        thread with the reason why rounds wait for ever: it ends the process.
        """
        super().__init__(scheduler, send, on_end)
        self._ranks, self._refuse, self._give_up = scheduler.engine.target.ranks, refuse, give_up
        self._ended = threading.Event()  # after the last round
        self._heard: deque[messages.FromServer] = deque()
        self._asked = dict[int, Done]()  # callbacks of received changes, by number
        self._grammars: dict[tuple[int, ...], Grammar] = {}  # of requests that were heard, by their sequences' numbers

    def submit(self, request: messages.Submit, grammar: Grammar | None) -> None:
        """Queue the sequences of a request in the next round; failures are passed to `refuse`."""
        if grammar is not None:
            self._grammars[request.numbers] = grammar
        self._heard.append(request)
        self._work.set()

    def cancel(self, numbers: Iterable[int]) -> None:
        """End the sequences with these numbers in the next round; ended sequences are ignored."""
        self._heard.append(messages.Cancel(tuple(numbers)))
        self._work.set()

    def change(self, message: messages.ChangeAdapters | messages.ChangeEngine, done: Done) -> None:
        """Prepare a change before the next round, on all ranks; `done` is also called if it is refused."""
        self._asked[message.number] = done
        self._heard.append(message)
        self._work.set()

    def _round_failed(self, error: Exception, count: int) -> None:
        raise error  # ends the rounds: after a failure, the ranks' steps may have diverged

    def run_here(self) -> bool:
        """Run the rounds in this thread until rank 0 ends them; return True if nothing failed."""
        self._run()
        return self.failure is None

    def _run(self) -> None:
        threading.Thread(target=self._watch, name="redrafter-watch", daemon=True).start()
        try:
            super()._run()
        finally:
            self._ended.set()

    def _watch(self) -> None:
        """Give the rounds up if another rank is lost for some seconds, and they have not ended by then."""
        lost_since = float("inf")
        while not self._ended.wait(WATCH_SECONDS):
            reason = self._ranks.describe_lost()
            lost_since = min(lost_since, time.monotonic()) if reason else float("inf")
            if reason is not None and time.monotonic() - lost_since >= LOST_SECONDS:
                # A stopped process ends at no other signal, and torchrun would wait for it.
                for rank in self._ranks.stopped():
                    with suppress(psutil.NoSuchProcess):  # another rank's watch may have been first
                        self._ranks.peers[rank].kill()
                self._give_up(reason)

    def _continues(self) -> bool:
        """Receive rank 0's messages and apply them; return False when the rounds should end. Collective."""
        if self._ranks.rank == 0:
            if self._rests and not self._heard and not self._stopping:
                # Bounded, since the other ranks wait in a collective meanwhile, which has a timeout.
                self._work.wait(IDLE_SECONDS)
            self._work.clear()
        heard = [self._heard.popleft() for _ in range(len(self._heard))]
        # All ranks must apply the same messages before the same step, or their schedules diverge.
        # `stop` may set its flag during the broadcast: it counts before the next round.
        received, stopping = self._ranks.from_first((heard, self._stopping))
        for message in received:
            if isinstance(message, messages.Cancel):
                super().cancel(message.numbers)
                continue
            if isinstance(message, messages.ChangeAdapters | messages.ChangeEngine):
                done = self._asked.pop(message.number, lambda error, names: None)
                try:
                    super().change(message, done)
                except ReDrafterError as error:
                    done(error, ())
                continue
            try:
                super().submit(message, self._grammar_of(message))
            except Exception as error:
                self._refuse(message, error)
        return not stopping

    def _grammar_of(self, request: messages.Submit) -> Grammar | None:
        """Return the grammar of a request: rank 0 has compiled it, and follows it for the others."""
        if request.grammar is None:
            return None
        return Grammar.of_first_rank(request.grammar) if self._ranks.rank else self._grammars.pop(request.numbers)

    def _explain(self, error: BaseException) -> str:
        """Describe an error; if ranks that have ended caused it, name them."""
        if isinstance(error, RuntimeError):  # torch has no other type for the errors of gloo's messages
            time.sleep(ENDED_SECONDS)
        if (reason := self._ranks.describe_lost()) is None:
            return super()._explain(error)
        _LOG.debug("%s: %s", reason, first_line(error))  # the server reports the reason
        return reason


def follow(request: LoadEngine) -> int:
    """Run this rank's part of the engine, on a rank other than 0, until rank 0 ends it; return the exit code."""
    engine = ServedEngine.load(request)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 receives them too, drains, and then ends this rank

    def give_up(reason: str) -> NoReturn:
        os._exit(2)

    worker = SharedWorker(engine.scheduler, lambda written: None, lambda: None, lambda request, error: None, give_up)
    return 0 if worker.run_here() else 2
