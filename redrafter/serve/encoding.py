"""Encode texts without delaying other clients: in threads without the GIL, and in turns by client."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

LONG_TEXT = 1 << 13  # characters; a shorter text takes up to 3 ms
# Requests encoded at once in total and per client, for small (False) and large (True) bodies.
AT_ONCE = {False: (4, 2), True: (2, 1)}
LOOP_REST = (
    4  # pause after encoding a request, in multiples of its time: encoding takes a fifth of the event loop at most
)
T = TypeVar("T")


class TextEncoder:
    """Encodes texts with one tokenizer.

    The `tokenizers` library encodes a batch without the GIL, so a long text in a thread delays no other request. Other
    tokenizers, and those that override how texts are encoded, hold it. Truncation and padding, which a tokenizer's file
    may ask for, are switched off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer):
        self._tokenizer: Any = tokenizer
        self._backend: Tokenizer | None = tokenizer if isinstance(tokenizer, Tokenizer) else None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            derived = takewhile(lambda kind: kind is not PreTrainedTokenizerFast, type(tokenizer).__mro__)
            # A subclass that overrides encoding must be called; otherwise its Rust tokenizer gives the same ids faster.
            if not any({"__call__", "_encode_plus"} & {*vars(kind)} for kind in derived):
                self._backend = tokenizer.backend_tokenizer
                if self._backend.encode_special_tokens != tokenizer.split_special_tokens:
                    self._backend.encode_special_tokens = tokenizer.split_special_tokens
        # Changed only if need be: a tokenizer that encodes in another thread refuses changes.
        if (backend := self._backend) is not None and backend.truncation is not None:
            backend.no_truncation()
        if backend is not None and backend.padding is not None:
            backend.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""
        if self._backend is not None:  # as a batch, which releases the GIL; `encode` would hold it
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


class ClientTurns:
    """Semaphores that limit concurrent work: `all` in total, with a lower limit for each client.

    The per-client limit keeps capacity free for other clients while one has much work.
    """

    def __init__(self, at_once: int, at_once_per_client: int):
        self.all = asyncio.Semaphore(at_once)
        self._at_once_per_client = at_once_per_client
        self._clients: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def for_client(self, client: str) -> asyncio.Semaphore:
        """Return the semaphore of a client, to be acquired before `all`."""
        return self._clients.setdefault(client, asyncio.Semaphore(self._at_once_per_client))


class EncodingThreads:
    """Threads that encode requests in turns by client; requests with large bodies have separate threads.

    The event loop encodes a short request itself, without a turn, as long as that takes a fifth of its time at most.
    """

    def __init__(self) -> None:
        self._turns = {large: ClientTurns(*counts) for large, counts in AT_ONCE.items()}
        most = sum(count for count, _ in AT_ONCE.values())
        self._threads = ThreadPoolExecutor(most, "redrafter-encoding")
        self._rests_until = 0.0  # by `time.perf_counter`

    @property
    def may_run_here(self) -> bool:
        """Return whether the event loop has rested since it last encoded a request itself."""
        return time.perf_counter() >= self._rests_until

    def run_here(self, encode: Callable[[], T]) -> T:
        """Encode a request in the calling thread, that of the event loop, which then rests from that for a while."""
        began = time.perf_counter()
        try:
            return encode()
        finally:
            now = time.perf_counter()
            self._rests_until = now + LOOP_REST * (now - began)

    async def run_encoding(self, encode: Callable[[], T], client: str, large: bool) -> T:
        """Encode a request of a client in a thread, and return the result.

        After a large request, the client waits for as long as its thread has computed before its next turn, so that it
        uses at most half of a thread.
        """
        turns = self._turns[large]
        own = turns.for_client(client)
        await own.acquire()
        seconds = 0.0

        def timed() -> T:
            nonlocal seconds
            begin = time.thread_time()
            try:
                return encode()
            finally:
                seconds = time.thread_time() - begin

        loop = asyncio.get_running_loop()
        try:
            async with turns.all:
                return await until_thread_is_free(loop.run_in_executor(self._threads, timed))
        finally:
            # A client waits as long as its large prompt took, so that it gets at most half of its turns.
            loop.call_later(seconds if large else 0, own.release)


async def until_thread_is_free(work: "asyncio.Future[T]", on_cancel: Callable[[], object] = lambda: None) -> T:
    """Return the result of work in a thread. If the caller is cancelled, call `on_cancel` and wait for the thread."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
