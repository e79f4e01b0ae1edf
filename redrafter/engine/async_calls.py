"""Calls of `generate` by coroutines, which are decoded together in one running batch.

A thread runs the rounds of a scheduler of the engine while there are calls, and ends with the last of them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from redrafter.cache.to_device import made_on_host
from redrafter.engine.call import GenerateCall, GenerateOutput, StepStreamer
from redrafter.engine.options import EngineOptions
from redrafter.engine.request import CALL_ARGUMENTS, OwnArguments, Request, read_request, row_adapters, row_draft_limits
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.features import ADAPTIVE_DRAFTS, ASYNC_CALLS, SERVING, FeatureSet
from redrafter.model.supported import check_autocast
from redrafter.scheduler.engine_change import Models
from redrafter.scheduler.paged_memory import PagedMemory
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import check_draft_limit
from redrafter.scheduler.waiting_queue import Limits

ReadCall: TypeAlias = Callable[[OwnArguments, Tensor, dict[str, Any]], Request]


class SharedEngine(Models, Protocol):
    """The parts of an engine that calls of coroutines use. Engines implement this protocol."""

    options: EngineOptions
    adaptive: bool

    @property
    def shared_memory(self) -> PagedMemory:
        """The paged memory of `generate`, of this engine or of the one that lends it."""

    def make_memory(self, rows: int) -> PagedMemory:
        """Allocate a paged cache for at most `rows` rows of the longest sequence."""

    def calling(self, *, speculate: bool) -> AbstractContextManager[None]:
        """Enter a context in which a call is decoded, and no change is made."""

    def prepare_call(self, decode: ReadCall, own: OwnArguments, *prompts: Any, **arguments: Any) -> Request:
        """Let transformers prepare the arguments of a call, and return what `decode` returns for them."""


class _PendingCall:
    """A call that is being decoded, and the coroutine that waits for it."""

    def __init__(self, request: Request, held: ExitStack, stream: StepStreamer | None):
        self.call = GenerateCall(request, stream)
        self.sequences = [row.sequence for row in self.call.rows]
        self._held = held  # the contexts that hold its adapters, and the engine's weights
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    @property
    def ended(self) -> bool:
        """Return whether all of its sequences have ended."""
        return self.call.ended == len(self.sequences)

    def finish(self, error: BaseException | None) -> None:
        """Release what the call holds, and wake its coroutine, from the thread of the rounds."""
        self._held.close()

        def wake() -> None:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

        with suppress(RuntimeError):  # the loop was closed before the call ended
            self._loop.call_soon_threadsafe(wake)


class _TokenQueue:
    """A streamer that hands the tokens of one row to a coroutine."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put_step(self, row: int, tokens: Sequence[int], accepted: int, ended: bool) -> None:
        """Take the tokens that a step added, from the thread of the rounds."""
        self._put(tokens)

    def end(self) -> None:
        """Take note that the row has ended."""
        self._put(None)

    def _put(self, tokens: Sequence[int] | None) -> None:
        with suppress(RuntimeError):  # the loop was closed before the call ended
            self._loop.call_soon_threadsafe(self.steps.put_nowait, tokens)


class AsyncCalls:
    """Decodes the calls of an engine's `agenerate` and `astream`."""

    def __init__(self, engine: SharedEngine):
        if engine.adaptive:
            FeatureSet("agenerate()", ADAPTIVE_DRAFTS).check(SERVING)
        engine.target.features.check(ASYNC_CALLS)
        limits, target = Limits(), engine.target
        rows = min(limits.max_batch_size, engine.options.max_batch_size)
        on_gpu = target.device.type == "cuda"  # where the memory of `generate` has room for both
        memory = engine.shared_memory if on_gpu else engine.make_memory(rows)
        self._engine = engine
        self._scheduler = Scheduler(engine, memory, Limits(max_batch_size=rows, max_queue_size=0))
        self._lock = threading.Lock()
        self._calls: list[_PendingCall] = []
        self._thread: threading.Thread | None = None
        # One call is prepared at a time, and not in the event loop, which would stand still meanwhile.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="redrafter-prepare")

    async def generate(
        self, prompts: Sequence[Any], arguments: Mapping[str, Any], stream: StepStreamer | None = None
    ) -> Tensor | GenerateOutput:
        """Decode a call with the arguments of `Engine.generate`; cancelling the coroutine ends its sequences."""
        if arguments.get("streamer") is not None:
            raise UnsupportedError("agenerate() takes no streamer: write async for token in engine.astream(...)")
        held = ExitStack()
        try:
            prepare = asyncio.get_running_loop().run_in_executor(
                self._preparing, self._prepare, prompts, arguments, held
            )
            try:
                request = await asyncio.shield(prepare)
            except asyncio.CancelledError:
                await asyncio.wait([prepare])  # which still enters contexts of `held`
                raise
            pending = _PendingCall(request, held, stream)
            self._submit(pending)
        except BaseException:
            held.close()
            raise
        try:
            await pending.done
        except asyncio.CancelledError:
            self._scheduler.cancel(*pending.sequences)
            raise
        if pending.call.error is not None:
            raise pending.call.error
        return pending.call.output()

    async def stream(self, prompts: Sequence[Any], arguments: Mapping[str, Any]) -> AsyncIterator[int]:
        """Yield the tokens of a call of one output row as they are written; closing the iterator ends the sequence."""
        queue = _TokenQueue()
        task = asyncio.ensure_future(self.generate(prompts, {**arguments, "return_dict_in_generate": False}, queue))
        task.add_done_callback(lambda _: queue.steps.put_nowait(None))
        try:
            while (tokens := await queue.steps.get()) is not None:
                for token in tokens:
                    yield token
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    @torch.inference_mode()
    def _prepare(self, prompts: Sequence[Any], arguments: Mapping[str, Any], held: ExitStack) -> Request:
        """Turn the arguments of a call into a request that the shared batch can decode."""
        engine = self._engine

        def read_call(own: OwnArguments, input_ids: Tensor, inputs: dict[str, Any]) -> Request:
            if not own.speculate:
                given = own.num_speculative_tokens
                for limit in row_draft_limits(given, len(given) if isinstance(given, Sequence) else 1):
                    check_draft_limit(limit, depth=0)
                own = own._replace(num_speculative_tokens=0)
            names = row_adapters(own.adapter, own.prompts or len(input_ids), len(input_ids))
            check_autocast(engine.target.device)
            held.enter_context(engine.calling(speculate=True))
            adapters = held.enter_context(engine.target.adapters.holding(names))
            with made_on_host():
                return read_request(engine.target, engine.options, own, adapters, input_ids, **inputs)

        own = OwnArguments(**{name: value for name, value in arguments.items() if name in CALL_ARGUMENTS})
        others = {name: value for name, value in arguments.items() if name not in CALL_ARGUMENTS}
        request = engine.prepare_call(read_call, own, *prompts, **others)
        custom = next((each for params in request.params for each in (*params.extra, *params.extra_last)), None)
        if custom is not None:
            raise UnsupportedError(
                f"agenerate() shares its steps with other calls, and takes no {type(custom).__name__} of your own: "
                "use arguments that a server's requests have, or await asyncio.to_thread(engine.generate, ...)"
            )
        if request.deadline < float("inf"):
            raise UnsupportedError("agenerate() takes no max_time: write async with asyncio.timeout(seconds)")
        return request

    def _submit(self, pending: _PendingCall) -> None:
        if isinstance(pending.call.stream, _TokenQueue) and len(pending.sequences) != 1:
            rows = len(pending.sequences)
            raise ArgumentError(f"astream() writes one text, got {rows} output rows: call it once for each")
        with self._lock:
            self._scheduler.submit(*pending.sequences)
            self._calls.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_rounds, name="redrafter-async", daemon=True)
                self._thread.start()

    @torch.inference_mode()
    def _run_rounds(self) -> None:
        scheduler = self._scheduler
        while True:
            with self._lock:
                ended = [pending for pending in self._calls if pending.ended]
                self._calls = [pending for pending in self._calls if not pending.ended]
            for pending in ended:
                pending.finish(None)
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
            try:
                scheduler.prefill()
                scheduler.step()
            except BaseException as error:
                scheduler.abandon()
                with self._lock:
                    failed, self._calls, self._thread = self._calls, [], None
                for pending in failed:
                    pending.finish(error)
                return


class AsyncGeneration:
    """The coroutines of an engine."""

    async def agenerate(self, *prompts: Any, **arguments: Any) -> Tensor | GenerateOutput:
        """Return what `generate` returns of the same arguments, without blocking the event loop.

        Calls that run at once share a batch on a paged cache, as a server's requests do. Cancelling the coroutine ends
        its sequences. A streamer, `max_time`, processors that no request of a server has, and tensor parallelism are
        refused by name.
        """
        return await self._async_calls.generate(prompts, arguments)

    def astream(self, *prompts: Any, **arguments: Any) -> AsyncIterator[int]:
        """Return an asynchronous iterator over the new tokens of one prompt, as steps write them.

        Arguments are those of `agenerate`. Closing the iterator, or cancelling what iterates, ends the sequence.
        """
        return self._async_calls.stream(prompts, arguments)

    @cached_property
    def _async_calls(self) -> AsyncCalls:
        return AsyncCalls(cast(SharedEngine, self))
