"""The thread in which the engine works, and how an asyncio server listens to it."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from redrafter.serve.job import Job, Piece, Settings
from redrafter.serve.scheduler import Scheduler

__all__ = ["Stopped", "Worker"]


_Item = tuple[int, Piece]
_Queue = asyncio.Queue[_Item]


class Stopped(Exception):
    """The server takes nothing new any more."""


class Worker:
    """Rounds of a scheduler as long as there is work. told: of every piece, in the engine's thread."""

    def __init__(self, scheduler: Scheduler, told: Callable[[Job, Piece], object] = lambda job, piece: None):
        self.scheduler, self._told = scheduler, told
        self._work = threading.Event()
        self._out: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Queue, _Item]]] = defaultdict(list)
        self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="redrafter-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._draining

    def drain(self) -> None:
        """Take nothing new; what was taken goes on."""
        self._draining = True

    def stop(self) -> None:
        """Drop what is left and end."""
        self._draining = self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    async def pieces(
        self, prompts: Sequence[Sequence[int]], room: int, settings: Settings, stops: Callable[[], Callable | None]
    ) -> AsyncIterator[tuple[int, Job, list[Piece]]]:
        """Serve some prompts, prompt i under seed + i. Yields the number of a prompt with what was written since it was
        yielded last, until all have ended: whoever is slower than the engine gets more at once. Whoever leaves this
        iterator early cancels the rest.

        stops: makes what watches one text. Raises `Stopped`, and as `Scheduler.submit` does, before the first piece.
        """
        if not self.alive:
            raise Stopped
        loop = asyncio.get_running_loop()
        queue: _Queue = asyncio.Queue()

        def sink(number: int) -> Callable[[Job, Piece], None]:
            def tell(job: Job, piece: Piece) -> None:
                self._told(job, piece)
                self._out[loop].append((queue, (number, piece)))

            return tell

        jobs = [
            Job(prompt, room, replace(settings, seed=settings.seed + number), sink(number), stops())
            for number, prompt in enumerate(prompts)
        ]
        left = len(jobs)
        try:
            self.scheduler.submit(*jobs)
            self._work.set()
            while left:
                found: defaultdict[int, list[Piece]] = defaultdict(list)
                first = await queue.get()
                for number, piece in (first, *(queue.get_nowait() for _ in range(queue.qsize()))):
                    found[number].append(piece)
                    left -= piece.finish is not None
                for number, each in found.items():
                    yield number, jobs[number], each
        finally:
            for job in jobs:
                self.scheduler.cancel(job)  # of one that has ended, that says nothing
            self._work.set()

    def _run(self) -> None:
        while not self._stopping:
            if self.scheduler.idle:
                self._work.wait()
                self._work.clear()
            else:
                self.scheduler.read()
                self._deliver()  # a first token does not wait for the step
                self.scheduler.step()
                self._deliver()

    def _deliver(self) -> None:
        """What was written, to whoever listens, in one call: each one wakes its loop up, which costs the engine."""

        def put(items: Sequence[tuple[_Queue, _Item]]) -> None:
            for queue, item in items:
                queue.put_nowait(item)

        for loop, items in self._out.items():
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(put, items)
        self._out.clear()
