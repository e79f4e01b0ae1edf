"""Grammars that clients send: compiled once for all, dropped with the last who waits, and a danger to nobody."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from helpers.chats import tiny_tokenizer
from helpers.processes import children, engine_of, soon
from helpers.serving import Program
from redrafter.grammar.grammar import GrammarProcess, server_for
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.engine_process import process
from redrafter.serve.engine_process.process import MAX_COMPILATIONS, MAX_COMPILATIONS_PER_CLIENT, Grammars

TOKENIZER = tiny_tokenizer()
QUICK = {"regex": "[ab]{3}"}


def slow(number: int) -> dict[str, Any]:
    """A grammar that takes minutes, and is no other number's."""
    parts = [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 45)]
    return {"json_schema": {"title": str(number), "allOf": parts}}


def compilations() -> list[int]:
    return children(server_for(TOKENIZER).pid)


@pytest.fixture
def started(monkeypatch) -> list[GrammarProcess]:
    """The processes that are started."""
    processes: list[GrammarProcess] = []

    def start(tokenizer: Any) -> GrammarProcess:
        processes.append(GrammarProcess(tokenizer))
        return processes[-1]

    monkeypatch.setattr(process, "GrammarProcess", start)
    gc.collect()
    assert soon(lambda: not compilations())
    return processes


@asynccontextmanager
async def asking(grammars: Grammars) -> AsyncIterator[Callable[..., "asyncio.Task"]]:
    """A function `ask(spec, client)` that begins to ask for a grammar."""
    tasks: set[asyncio.Task] = set()

    def ask(spec: object, client: str = "") -> asyncio.Task:
        task = asyncio.ensure_future(grammars.get(GrammarSource.from_spec(spec), client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    try:
        yield ask
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def come(holds: Callable[[], object], seconds: float = 300) -> bool:
    return await asyncio.to_thread(soon, holds, seconds)


async def test_one_compilation_serves_all(started):
    async with asking(Grammars(TOKENIZER)) as ask:
        grammars_of_clients = await asyncio.gather(*(ask(QUICK, f"client {number}") for number in range(8)))
        assert len(set(grammars_of_clients)) == 1 == len(started)
        assert await ask(QUICK) is grammars_of_clients[0]
        assert len(started) == 1
        named = ({"type": "object", "properties": {key: {} for key in names}} for names in ("ab", "ba"))
        first, second = [await ask({"json_schema": schema}) for schema in named]
        assert first is not second  # the order of properties is that of the text


async def test_who_leaves_ends_a_compilation_and_another_begins_again(started):
    async with asking(Grammars(TOKENIZER)) as ask:
        first, second = ask(slow(0), "one"), ask(slow(0), "two")
        assert await come(lambda: len(compilations()) == 1)
        first.cancel()
        assert await come(lambda: len(started) == 2)
        assert await come(lambda: len(compilations()) == 1, 8)  # the first had 9 s of a processor left
        assert not second.done()
        second.cancel()
        assert await come(lambda: not compilations(), 8)


async def test_slow_grammars_block_no_quick_ones_and_one_client_not_the_others(started):
    async def work() -> None:  # whose tasks hold their grammars
        async with asking(Grammars(TOKENIZER)) as ask:
            many = [ask(slow(number), "greedy") for number in range(MAX_COMPILATIONS_PER_CLIENT + 3)]
            assert await come(lambda: len(compilations()) == MAX_COMPILATIONS_PER_CLIENT)
            await ask(QUICK, "another")
            assert len(started) == MAX_COMPILATIONS_PER_CLIENT + 1
            assert not any(task.done() for task in many)
            many[0].cancel()  # its place goes to another of its client
            assert await come(lambda: len(started) == MAX_COMPILATIONS_PER_CLIENT + 2)

    await work()
    assert MAX_COMPILATIONS_PER_CLIENT < MAX_COMPILATIONS
    started.clear()
    gc.collect()
    assert await come(lambda: not compilations())  # which lets those that were stopped end


async def test_what_died_is_compiled_again(started):
    async with asking(Grammars(TOKENIZER)) as ask:
        before = await ask(QUICK)
        [child] = compilations()
        os.kill(child, signal.SIGKILL)
        assert await come(lambda: not before.process.alive)
        assert await ask(QUICK) is not before


async def test_few_grammars_are_kept_and_those_in_use_are_bounded(started, monkeypatch):
    monkeypatch.setattr(process, "MAX_KEPT_GRAMMARS", 2)
    monkeypatch.setattr(process, "MAX_LIVING_GRAMMARS", 4)
    async with asking(Grammars(TOKENIZER)) as ask:
        for number in range(6):
            await ask({"regex": f"a{{{number}}}b"})
        started.clear()
        gc.collect()
        assert await come(lambda: len(compilations()) == 2)
        used = [await ask({"regex": f"a{{{number}}}c"}) for number in range(4)]
        with pytest.raises(QueueFullError, match="4 other grammars are in use"):
            await ask({"regex": "d"})
        assert await ask({"regex": "a{3}c"}) is used[3]
        monkeypatch.setattr(process, "MAX_LIVING_GRAMMARS", 99)
        monkeypatch.setattr(process, "MAX_LIVING_BYTES", 0)
        used[0].process.memory = 1
        with pytest.raises(QueueFullError, match="other grammars that are in use hold"):
            await ask({"regex": "d"})
        used[0].process.memory = 0
        monkeypatch.setattr(process, "MAX_LIVING_BYTES", 1 << 40)
        monkeypatch.setattr(process, "MAX_KEPT_BYTES", 0)
        used.clear()
        started.clear()
        await ask({"regex": "e"})
        assert await come(lambda: len(compilations()) == 1)


def complete(program: Program, spec: object, timeout: Any = 300, **more: Any) -> httpx.Response:
    body = {"prompt": "Answer:", "max_tokens": 40, "temperature": 0, "structured_outputs": spec} | more
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}  # with halves of characters
    return httpx.post(f"{program.url}/v1/completions", content=content, headers=headers, timeout=timeout)


def forked(program: Program) -> list[int]:
    """The processes of the server's grammars."""
    servers = children(engine_of(program.process.pid))
    return [child for server in servers for child in children(server)]


def test_a_client_that_leaves_ends_its_compilation(program):
    before = set(forked(program))
    with pytest.raises(httpx.ReadTimeout):
        complete(program, {"json": slow(1)["json_schema"]}, timeout=httpx.Timeout(60, read=2))
    assert soon(lambda: set(forked(program)) <= before)
