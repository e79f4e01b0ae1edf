"""Encode texts without delaying other clients: long texts in processes, requests in turns by client."""

import asyncio
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TypeVar
from weakref import WeakValueDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from redrafter.sandbox.frames import receive_frame, send_frame
from redrafter.sandbox.process import SandboxedProcess, Zygote, zygote_of
from redrafter.serve.protocol.requests import ApiError

LONG_TEXT = 1 << 13  # characters; a shorter text takes up to 3 ms, about twice the cost of starting a process
WAIT_SECONDS = 120.0  # wall-clock time to encode one text, on a machine that is busy
# Requests encoded at once in total and per client, for small (False) and large (True) bodies.
AT_ONCE = {False: (4, 2), True: (2, 1)}
LOOP_REST = 4  # rest of the event loop, in times of what it took to encode a request: a fifth of its time at most
T = TypeVar("T")


class TextEncoder:
    """Encodes texts with one tokenizer.

    Long texts are encoded in processes of low priority: a thread of the server would occupy the engine's cores for
    seconds, and hold the GIL while it builds lists from the encoding. Tokenizers that do not belong to the `tokenizers`
    library, or that override how texts are encoded, encode in the calling thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Tokenizer):
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = None
        self._splits_special = False
        if isinstance(tokenizer, Tokenizer):
            self._backend = tokenizer
        elif isinstance(tokenizer, PreTrainedTokenizerFast):
            derived = takewhile(lambda kind: kind is not PreTrainedTokenizerFast, type(tokenizer).__mro__)
            # A subclass that overrides encoding must be called; otherwise its Rust tokenizer gives the same ids faster.
            if not any({"__call__", "_encode_plus"} & {*vars(kind)} for kind in derived):
                self._backend, self._splits_special = tokenizer.backend_tokenizer, tokenizer.split_special_tokens

    def encode(self, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; errors name the field `param` of the request.

        Raises:
            ApiError: The text takes too long or too much memory.
        """
        if self._backend is not None and len(text) > LONG_TEXT:
            return self._encode_apart(text, param, add_special_tokens)
        if isinstance(self._tokenizer, Tokenizer):  # as a batch, which releases the GIL; `encode` would hold it
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _encode_apart(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        process = SandboxedProcess(lambda: zygote_of(self, self._start))
        connection = process.connection
        try:
            connection.settimeout(WAIT_SECONDS)
            send_frame(connection, b"1" if add_special_tokens else b"0")
            send_frame(connection, text.encode())
            return array("I", bytes(receive_frame(connection))).tolist()
        except (EOFError, OSError) as error:
            what = "the prompt takes too long or too much memory to be tokenized: shorten it"
            raise ApiError(400, what, param, "prompt_too_complex") from error
        finally:
            process.end()

    def _start(self) -> Zygote:
        assert self._backend is not None
        spec = self._backend.to_str().encode()
        return Zygote("redrafter.serve.encoding_process", [spec, b"1" if self._splits_special else b"0"])


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
