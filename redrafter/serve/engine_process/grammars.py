"""Compiled grammars of a server: compiled once for all clients, kept for later requests, bounded in number."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar, GrammarProcess
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.limits import QueueFullError

MAX_KEPT_GRAMMARS = 32  # grammars kept for later requests
MAX_KEPT_BYTES = 1 << 30  # bytes that they may hold together
MAX_LIVING_GRAMMARS = 256  # grammars in use by a sequence or kept
MAX_LIVING_BYTES = 8 << 30  # bytes that they may hold together
MAX_COMPILATIONS = 16  # grammars that are compiled at once
MAX_COMPILATIONS_PER_CLIENT = 10  # fewer, so that those of others go on beside one client's slow ones
MAX_REMEMBERED_REFUSALS = 64  # grammars whose refusal is remembered
REFUSAL_SECONDS = 60.0  # for which it is

Result = TypeVar("Result")


@dataclass
class _Compilation:
    """A grammar that is being compiled, and how many requests wait for it."""

    task: "asyncio.Task[Grammar]"
    waiting: int = 0


class Grammars:
    """Compiled grammars over the vocabulary of one tokenizer. All methods are for the thread of one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSource, tuple[float, str]] = OrderedDict()
        self._begun: dict[GrammarSource, _Compilation] = {}
        self._living: WeakSet[Grammar] = WeakSet()
        self._clients: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._compilers = asyncio.Semaphore(MAX_COMPILATIONS)
        self._threads = ThreadPoolExecutor(MAX_COMPILATIONS, "grammar")  # they wait for processes

    async def get(self, source: GrammarSource, client: str) -> Grammar:
        """Return a compiled grammar, of an earlier request if it is kept, or raise `ArgumentError` or `QueueFullError`.

        The compilation is stopped when nobody waits for it any more. Of one client, `MAX_COMPILATIONS_PER_CLIENT`
        grammars are compiled at once.
        """
        if source not in self._begun:
            semaphore = self._clients.setdefault(client, asyncio.Semaphore(MAX_COMPILATIONS_PER_CLIENT))
            async with semaphore:  # not for a client that joins a compilation
                if (kept := self._kept.get(source)) is not None and kept.process.alive:
                    self._kept.move_to_end(source)
                    return kept
                if source not in self._begun:
                    self._check(source)
                    task = asyncio.ensure_future(self._compile(source))
                    # Marks an error as seen, even if nobody waits.
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())
                    self._begun[source] = _Compilation(task)
                return await self._wait(source)
        return await self._wait(source)

    def _check(self, source: GrammarSource) -> None:
        """Raise for a grammar that was refused a moment ago, and if too many grammars are in use."""
        when, why = self._refused.get(source, (0.0, ""))
        if why and time.monotonic() - when < REFUSAL_SECONDS:
            raise ArgumentError(why)
        if len(self._living) + len(self._begun) >= MAX_LIVING_GRAMMARS:
            raise QueueFullError(f"{MAX_LIVING_GRAMMARS} other grammars are in use, and no more may be")
        if sum(grammar.process.memory for grammar in self._living) > MAX_LIVING_BYTES:
            raise QueueFullError(f"other grammars that are in use hold {MAX_LIVING_BYTES >> 30} GB, and no more may be")

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
                self._refused[source] = time.monotonic(), str(error)
                self._refused.move_to_end(source)
                while len(self._refused) > MAX_REMEMBERED_REFUSALS:
                    self._refused.popitem(last=False)
                raise
            except asyncio.CancelledError:
                process.end()
                raise
        self._living.add(grammar)
        self._kept[source] = grammar
        self._kept.move_to_end(source)
        held_bytes = sum(grammar.process.memory for grammar in self._kept.values())
        while len(self._kept) > MAX_KEPT_GRAMMARS or (held_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            held_bytes -= self._kept.popitem(last=False)[1].process.memory
        return grammar

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
