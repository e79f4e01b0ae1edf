"""Start and end the engine's process, connect to it, and receive its facts once it is loaded.

Nothing here imports torch, so that the process can be started before the server has imported it.
"""

import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ReDrafterError
from redrafter.features import HOST_CACHE, NO_PREFIX_REUSE, FeatureSet
from redrafter.sandbox.process import shut_down, start_interpreter
from redrafter.scheduler.request import RequestBounds
from redrafter.serve.config import ServeOptions

# A fresh interpreter, since CUDA does not survive a fork. It ignores Ctrl-C, which is for the server, from the start.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from redrafter.app.program import import_libraries; "
    "import_libraries('redrafter.serve.engine_process.process').main(int(sys.argv[1]))"
)
END_SECONDS = 5.0  # time for the process to end once the connection is closed


@dataclass(frozen=True)
class LoadEngine:
    """The server's first message: what to load."""

    options: ServeOptions
    load: LoadOptions
    draft: DraftOptions

    def __post_init__(self) -> None:
        if self.load.kv_host_cache_gib and not self.options.kv_cache_reuse:
            FeatureSet("redrafter serve", NO_PREFIX_REUSE).check(HOST_CACHE)


@dataclass(frozen=True)
class EngineFacts:
    """The answer of a loaded engine: facts that its server needs."""

    model: str  # directory or hub id
    description: tuple[str, ...]  # log lines that describe the model and its drafts
    bounds: RequestBounds  # what requests may ask for
    end_tokens: frozenset[int]  # ids that end a sequence
    sampling: Mapping[str, float]  # default sampling parameters, by name
    reuse: bool  # whether cached prefixes are reused
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters' directories, by name
    image_inputs: frozenset[str] = frozenset()  # names of the model's inputs for images, in addition to ids and mask


class EngineEndedError(ReDrafterError):
    """The engine's process ended without being asked to."""


class Channel:
    """One end of the connection between a server and its engine, with pickles as messages.

    A separate thread sends them, so that a sender never waits for the other end. Both ends run the same program. No
    other process may reach the connection, since unpickling can execute arbitrary code.
    """

    def __init__(self, connection: Connection):
        # By default a thread waits 5 ms for Python's lock while another computes: so long first tokens were not sent.
        sys.setswitchinterval(0.5e-3)
        self._connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="redrafter-channel", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message, from any thread. Messages that the other end can no longer receive are dropped."""
        self._messages.put(message)

    def receive(self) -> Any:
        """Wait for the next message, in one thread at a time, or raise `EOFError` if either end is closed."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError("this end is closed") from error

    def close(self, flush_seconds: float = 0.0) -> None:
        """Close this end once all is sent or `flush_seconds` have passed; `receive` then raises at both ends."""
        self._messages.put(None)
        self._writer.join(timeout=flush_seconds)
        shut_down(self._connection)

    def _write(self) -> None:
        with suppress(OSError):  # the other end is gone, which `receive` reports
            while (message := self._messages.get()) is not None:
                # Not `send`, whose pickles would put tensors into shared memory.
                self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class EngineProcess:
    """The engine's process. It ends when its `channel` closes, so it cannot outlive this process."""

    def __init__(self, request: LoadEngine) -> None:
        connection, self._process = start_interpreter(PROGRAM)
        self.channel = Channel(connection)
        self.channel.send(request)

    def wait_until_loaded(self) -> EngineFacts:
        """Wait until the engine is loaded, and return its facts, or raise the error that prevented loading."""
        try:
            answer: EngineFacts | ReDrafterError = self.channel.receive()
        except EOFError:
            raise EngineEndedError(f"{self.describe_end()}: nothing is served") from None
        if isinstance(answer, ReDrafterError):
            raise answer
        return answer

    def end(self) -> None:
        """Wait for the process to end after the connection is closed, and kill it if it does not."""
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the connection, and kill the process if it is still running."""
        self.channel.close()
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Wait for a process that has closed its end of the connection, and describe how it ended."""
        try:
            code = self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine has failed, and its process does not end"
        # `Popen` reports the signal's number as a negative code.
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system ends one that takes too much memory" if -code == signal.SIGKILL else ""
            return f"the engine's process was ended by {name}{hint}"
        return f"the engine's process ended with code {code}"
