"""Calls of `generate` by coroutines, which are decoded together in one running batch.

A thread runs the rounds of a scheduler of the engine while there are calls, and ends with the last of them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from redrafter.cache.to_device import on_device
from redrafter.engine.arguments import OwnArguments, PreparedCall
from redrafter.engine.call import GenerateCall, GenerateOutput
from redrafter.engine.request import CallRequest
from redrafter.engine.streamers import StepStreamer
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.scheduler.scheduler import Scheduler


class _PendingCall:
    """A call that is being decoded, and the coroutine that waits for it."""

    def __init__(self, request: CallRequest, held: ExitStack, stream: StepStreamer | None):
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

    def __init__(
        self,
        scheduler: Scheduler,
        prepare: Callable[..., PreparedCall],
        reading: Callable[[PreparedCall], AbstractContextManager[CallRequest]],
    ):
        """Begin without calls.

        Args:
            scheduler: Decodes all calls.
            prepare: Lets transformers prepare a call, given its `OwnArguments` and the others of `generate`.
            reading: Returns a context that yields the request of a prepared call, which it holds the weights for.
        """
        self._scheduler, self._prepare, self._reading = scheduler, prepare, reading
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
        prepare = self._preparing.submit(self._read, prompts, arguments, held)
        try:
            pending = _PendingCall(await asyncio.wrap_future(prepare), held, stream)
            self._submit(pending)
        except BaseException:
            # A call that is cancelled while it is read still enters contexts of `held`.
            prepare.add_done_callback(lambda _: held.close())
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
    def _read(self, prompts: Sequence[Any], arguments: Mapping[str, Any], held: ExitStack) -> CallRequest:
        """Turn the arguments of a call into a request that the shared batch can decode."""
        own = OwnArguments(**{name: value for name, value in arguments.items() if name in OwnArguments._fields})
        others = {name: value for name, value in arguments.items() if name not in OwnArguments._fields}
        request = held.enter_context(self._reading(self._prepare(own, *prompts, **others)))
        custom = next((each for row in request.rows for each in (*row.params.extra, *row.params.extra_last)), None)
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
                self._thread = threading.Thread(target=self._run_thread, name="redrafter-async", daemon=True)
                self._thread.start()

    def _run_thread(self) -> None:
        with torch.inference_mode(), on_device(self._scheduler.engine.target.device):
            self._run_rounds()

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
                with self._lock:  # no call comes between the abandoned and the failed ones
                    scheduler.abandon()
                    failed, self._calls, self._thread = self._calls, [], None
                for pending in failed:
                    pending.finish(error)
                return
