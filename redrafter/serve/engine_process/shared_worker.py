"""The worker of an engine that several ranks share: all run the same rounds, on the requests that rank 0 hears."""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable

from redrafter.errors import first_line
from redrafter.grammar.grammar import Grammar
from redrafter.scheduler.scheduler import Scheduler
from redrafter.serve.engine_process.engine import ServedEngine, load_pair
from redrafter.serve.engine_process.loading import LoadEngine
from redrafter.serve.engine_process.messages import Cancel, Submit, Written
from redrafter.serve.engine_process.worker import Worker

__all__ = ["SharedWorker", "follow"]

_LOG = logging.getLogger(__name__)

IDLE_SECONDS = 5.0  # after which idle ranks hear that there is nothing to do, long before they would give up
ENDED_SECONDS = 0.2  # after which a process whose connections are closed is known to have ended


class SharedWorker(Worker):
    """Runs the rounds of a scheduler on one of several ranks.

    Before each round, rank 0 tells the others what has come since the last one. All ranks apply it in the same order
    and then decide alike, so that they launch the same forwards.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[Written], object],
        on_end: Callable[[], object],
        refuse: Callable[[Submit, Exception], object],
    ):
        """Make a worker that has not started.

        Args:
            scheduler: The scheduler; nobody else may run its rounds.
            send: As in `Worker`.
            on_end: As in `Worker`.
            refuse: Called in the engine's thread with a request that cannot be queued, and why.
        """
        super().__init__(scheduler, send, on_end)
        self._ranks, self._refuse = scheduler.engine.target.ranks, refuse
        self._heard: deque[Submit | Cancel] = deque()
        scheduler.on_failure = self._fail

    def submit(self, request: Submit, grammar: Grammar | None) -> None:
        """Queue the texts of a request in the next round; one that cannot be queued is given to `refuse`."""
        assert grammar is None, "grammars are refused before"
        self._heard.append(request)
        self._work.set()

    def cancel(self, numbers: Iterable[int]) -> None:
        """End the texts with these numbers in the next round, except those that have ended."""
        self._heard.append(Cancel(tuple(numbers)))
        self._work.set()

    def run_here(self) -> bool:
        """Run the rounds in this thread until rank 0 ends them; return whether nothing failed."""
        self._run()
        return self.failure is None

    def _work_on(self) -> bool:
        """Hear what has come, and apply it. Return False when the rounds shall end. Collective."""
        if self._ranks.rank == 0:
            if self.scheduler.idle and not self._heard and not self._stopping:
                self._work.wait(IDLE_SECONDS)
            self._work.clear()
        heard = [self._heard.popleft() for _ in range(len(self._heard))]
        messages, self._stopping = self._ranks.from_first((heard, self._stopping))
        for message in messages:
            if isinstance(message, Cancel):
                super().cancel(message.numbers)
                continue
            try:
                super().submit(message, None)
            except Exception as error:
                self._refuse(message, error)
        return not self._stopping

    def _fail(self, error: Exception, count: int) -> None:
        """End the rounds: after a failure, this rank may have taken other steps than the others."""
        raise error

    def _explain(self, error: BaseException) -> str:
        """Name the ranks whose end made a message to them fail, if there are any."""
        if isinstance(error, RuntimeError):  # torch has no other type for the errors of gloo's messages
            time.sleep(ENDED_SECONDS)
        if not (ended := self._ranks.ended()):
            return super()._explain(error)
        reason = f"the process of rank {', '.join(map(str, ended))} has ended (torchrun reports how)"
        _LOG.error("%s: %s", reason, first_line(error))
        return reason


def follow(request: LoadEngine) -> int:
    """Load the part of an engine that a rank other than 0 has, and serve it until rank 0 ends the rounds.

    Args:
        request: What rank 0 loads too.

    Returns:
        The exit code: 1 if a round has failed.
    """
    engine = ServedEngine.of(load_pair(request), request.options, request.load)
    if request.options.warm_up:
        engine.warm_up()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 hears them too, lets texts end, and then ends this one
    worker = SharedWorker(engine.scheduler, lambda written: None, lambda: None, lambda request, error: None)
    return 0 if worker.run_here() else 1
