"""Encoding of long texts, and turns of clients whose requests are encoded."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

pytest.importorskip("fastapi")

from helpers.chats import tiny_tokenizer
from redrafter.scheduler.request import RequestBounds
from redrafter.serve import encoding
from redrafter.serve.encoding import LONG_TEXT, ClientTurns, EncodingThreads, TextEncoder
from redrafter.serve.prompts import PromptEncoder
from redrafter.serve.protocol.requests import ChatRequest
from redrafter.serve.server import SHORT_BODY_BYTES, Server

MARKS = "a b c <|user|> <|im_end|> "


@contextmanager
def longest_wait() -> Iterator[list[float]]:
    """The longest time for which another thread did not get Python's lock, in a list that is filled in the end."""
    ended, waits = threading.Event(), [0.0]

    def wait() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            waits.append(now - last)
            last = now

    thread = threading.Thread(target=wait)
    thread.start()
    longest = list[float]()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()
        longest.append(max(waits))


def test_no_thread_waits_for_all_of_a_long_chat_that_spells_control_tokens():
    tokenizer = tiny_tokenizer()
    prompts = PromptEncoder(tokenizer, "mine", RequestBounds(len(tokenizer), 1 << 20))
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": MARKS * 20_000}]})
    shares = []
    for _ in range(3):
        begin = time.perf_counter()
        with longest_wait() as longest:
            prompts.encode_chat(request)
        shares.append(longest[0] / (time.perf_counter() - begin))
    assert min(shares) < 0.5, shares


def test_every_tokenizer_encodes_as_if_it_were_called(pair):
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **how: Any) -> Any:
            return super()._encode_plus(*args, **how) | {"input_ids": [7]}

    cut = tiny_tokenizer()
    cut.backend_tokenizer.enable_truncation(4)
    text = "a b c " * LONG_TEXT
    for tokenizer in (pair[1], cut, Own(tokenizer_object=tiny_tokenizer().backend_tokenizer)):
        ids = TextEncoder(tokenizer).encode(text)
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [7]


def test_the_event_loop_encodes_a_short_request_itself():
    async def thread_of(template: int = 0, messages: Any = None, **facts: Any) -> threading.Thread:
        prompts = SimpleNamespace(template=SimpleNamespace(text="a" * template))
        server = SimpleNamespace(images="no images", prompts=prompts, _encoding=EncodingThreads())
        return await Server.encode(server, lambda _: threading.current_thread(), messages, facts)

    ours, short = threading.current_thread(), {"client": "a", "body_bytes": SHORT_BODY_BYTES}
    chat = [SimpleNamespace(images=[])]
    assert asyncio.run(thread_of(**short)) is ours
    assert asyncio.run(thread_of(LONG_TEXT - SHORT_BODY_BYTES, chat, **short)) is ours
    for facts in ({"body_bytes": SHORT_BODY_BYTES + 1}, {"body_bytes": 1 << 20}, {}):
        assert asyncio.run(thread_of(client="a", **facts)) is not ours
    assert asyncio.run(thread_of(LONG_TEXT, chat, **short)) is not ours  # the template adds a long text


def test_the_event_loop_encodes_short_requests_for_a_fifth_of_its_time_at_most(monkeypatch):
    seconds = {"all": 0.0, "encoding": 0.0}
    monkeypatch.setattr(encoding, "time", SimpleNamespace(perf_counter=lambda: seconds["all"], thread_time=lambda: 0.0))

    def encode(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            for each in seconds:
                seconds[each] += 0.004

    async def main() -> None:
        server = SimpleNamespace(images="no images", _encoding=EncodingThreads())
        for _ in range(100):
            await Server.encode(server, encode, None, {"client": "a", "body_bytes": SHORT_BODY_BYTES})
            seconds["all"] += 0.003

    asyncio.run(main())
    assert 0.15 < seconds["encoding"] / seconds["all"] <= 0.2


def test_a_client_with_many_requests_leaves_turns_to_others():
    async def main() -> None:
        turns, order = EncodingThreads(), list[str]()
        held, started = threading.Event(), threading.Event()

        def work(name: str, wait: bool) -> Callable[[], None]:
            def run() -> None:
                order.append(name)
                if wait:
                    started.set()
                    held.wait(60)

            return run

        greedy = [asyncio.create_task(turns.run_encoding(work("greedy", True), "a", True)) for _ in range(8)]
        await asyncio.to_thread(started.wait, 60)
        await turns.run_encoding(work("large", False), "b", True)
        await turns.run_encoding(work("small", False), "a", False)
        assert order == ["greedy", "large", "small"]
        held.set()
        await asyncio.gather(*greedy)
        assert order.count("greedy") == 8

    asyncio.run(main())


def test_a_client_pauses_after_a_large_request_for_as_long_as_it_computed():
    def compute() -> tuple[float, float]:
        begin, now = time.perf_counter(), time.thread_time()
        while time.thread_time() - now < 0.1:
            pass
        return begin, time.perf_counter()

    async def main() -> None:
        turns = EncodingThreads()
        (_, end), (begin, _) = await asyncio.gather(*(turns.run_encoding(compute, "a", True) for _ in range(2)))
        assert begin - end > 0.09

    asyncio.run(main())


def test_a_request_whose_client_has_left_keeps_its_turn_until_its_thread_is_free():
    async def main() -> None:
        turns, held, order = EncodingThreads(), threading.Event(), list[str]()
        left = asyncio.create_task(turns.run_encoding(lambda: held.wait(60), "a", True))
        await asyncio.sleep(0.05)
        left.cancel()
        following = asyncio.create_task(turns.run_encoding(lambda: order.append("following"), "a", True))
        await asyncio.sleep(0.05)
        assert not order
        held.set()
        await following
        assert left.cancelled()

    asyncio.run(main())


def test_turns_of_clients_are_forgotten():
    turns = ClientTurns(4, 2)
    first = turns.for_client("a")
    assert turns.for_client("a") is first
    assert turns.for_client("b") is not first
