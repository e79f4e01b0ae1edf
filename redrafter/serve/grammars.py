"""The grammars of a server: compiled once for all who ask, kept, and dropped when nobody waits for them any more."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.process import GrammarProcess
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.limits import QueueFullError

__all__ = ["Grammars"]

KEPT = 32  # grammars that no text follows
KEPT_MEMORY = 1 << 30  # bytes that they may hold together
LIVING = 256  # grammars that texts follow, those that are kept among them
LIVING_MEMORY = 8 << 30  # bytes that they may hold together
COMPILERS = 16  # grammars that are compiled at once; those of one client: fewer, and others' go on beside slow ones
OF_ONE_CLIENT = 10
REFUSED, REFUSAL = 64, 60.0  # grammars that are known to be refused, and seconds for which they are

Result = TypeVar("Result")


@dataclass
class _Compilation:
    """A grammar that is being compiled, and how many wait for it."""

    task: "asyncio.Task[Grammar]"
    waiting: int = 0


class Grammars:
    """Compiled grammars over one tokenizer's vocabulary; all methods are for the thread of one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSource, tuple[float, str]] = OrderedDict()
        self._begun: dict[GrammarSource, _Compilation] = {}
        self._living: WeakSet[Grammar] = WeakSet()
        self._clients: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._compilers = asyncio.Semaphore(COMPILERS)
        self._threads = ThreadPoolExecutor(COMPILERS, "grammar")  # they wait for processes

    async def get(self, spec: Any, client: str) -> Grammar:
        """Return a compiled grammar. Whoever is the last to wait for it and leaves, stops its compilation.

        Args:
            spec: what `Grammar.of` reads.
            client: who asks; a client's grammars wait for each other where there are many of them.

        Raises:
            ArgumentError: for a grammar that is wrong, too large or too complex.
            QueueFullError: where too many other grammars are in use.
        """
        source = GrammarSource.of(spec)
        if source not in self._begun:
            own = self._clients.setdefault(client, asyncio.Semaphore(OF_ONE_CLIENT))
            async with own:  # not for a client that joins others
                if (kept := self._kept_alive(source)) is not None:
                    return kept
                if source not in self._begun:
                    self._check(source)
                    self._begin(source)
                return await self._wait(source)
        return await self._wait(source)

    def _kept_alive(self, source: GrammarSource) -> Grammar | None:
        kept = self._kept.get(source)
        if kept is None or not kept.process.alive:
            return None
        self._kept.move_to_end(source)
        return kept

    def _check(self, source: GrammarSource) -> None:
        """Refuse at once what was refused a moment ago, and what there is no room for."""
        when, why = self._refused.get(source, (0.0, ""))
        if why and time.monotonic() - when < REFUSAL:
            raise ArgumentError(why)
        if len(self._living) + len(self._begun) >= LIVING:
            raise QueueFullError(f"{LIVING} other grammars are in use, and no more may be")
        if sum(each.process.memory for each in self._living) > LIVING_MEMORY:
            raise QueueFullError(f"other grammars that are in use hold {LIVING_MEMORY >> 30} GB, and no more may be")

    def _begin(self, source: GrammarSource) -> None:
        task = asyncio.ensure_future(self._compile(source))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to be told
        self._begun[source] = _Compilation(task)

    async def _wait(self, source: GrammarSource) -> Grammar:
        compilation = self._begun[source]
        compilation.waiting += 1
        try:
            return await asyncio.shield(compilation.task)
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.task.cancel()
                if self._begun.get(source) is compilation:
                    del self._begun[source]

    async def _compile(self, source: GrammarSource) -> Grammar:
        async with self._compilers:
            process = await self._in_thread(lambda: GrammarProcess(self._tokenizer))
            try:
                grammar = await self._in_thread(lambda: Grammar(source, self._tokenizer, process))
            except ArgumentError as error:
                self._refuse(source, str(error))
                raise
            except asyncio.CancelledError:
                process.end()
                raise
        self._keep(source, grammar)
        return grammar

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _refuse(self, source: GrammarSource, why: str) -> None:
        self._refused[source] = time.monotonic(), why
        self._refused.move_to_end(source)
        while len(self._refused) > REFUSED:
            self._refused.popitem(last=False)

    def _keep(self, source: GrammarSource, grammar: Grammar) -> None:
        self._living.add(grammar)
        self._kept[source] = grammar
        self._kept.move_to_end(source)
        held = sum(each.process.memory for each in self._kept.values())
        while len(self._kept) > KEPT or (held > KEPT_MEMORY and len(self._kept) > 1):
            held -= self._kept.popitem(last=False)[1].process.memory
