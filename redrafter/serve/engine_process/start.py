"""The engine's process as its server sees it: its start and end, the connection to it, and what it says once loaded.

Nothing here imports torch, so that the process can be started before the server has imported it.
"""

import pickle
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ReDrafterError
from redrafter.features import HOST_CACHE, NO_PREFIX_REUSE, FeatureSet
from redrafter.sandbox.frames import receive_frame, send_frame
from redrafter.sandbox.process import start_interpreter
from redrafter.serve.config import ServeOptions

# A fresh interpreter, since CUDA does not survive a fork. Ctrl-C is for the server, also before the modules are there.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from redrafter.serve.engine_process.process import main; main(int(sys.argv[1]))"
)
END_SECONDS = 5.0  # seconds that it has to end in once the connection is closed


@dataclass(frozen=True)
class LoadEngine:
    """The first message of a server: load this."""

    options: ServeOptions
    load: LoadOptions
    draft: DraftOptions

    def __post_init__(self) -> None:
        if self.load.kv_host_cache_gib and not self.options.kv_cache_reuse:
            FeatureSet("redrafter serve", NO_PREFIX_REUSE).check(HOST_CACHE)


@dataclass(frozen=True)
class EngineFacts:
    """The answer of an engine that is loaded: what its server must know of it."""

    model: str  # directory or hub id
    description: tuple[str, ...]  # lines for the log that say what is served
    vocab_size: int
    context: int  # most tokens of a prompt and the text after it
    end_tokens: frozenset[int]  # ids that end a text
    sampling: Mapping[str, float]  # sampling parameters of requests that leave them out, by name
    draft_depth: int  # levels of the deepest tree of drafts
    reuse: bool  # whether prompts are looked for in the cache
    batch_invariant: bool = False  # whether a text does not depend on what is computed beside it, bit for bit
    adapters: Mapping[str, str] = field(default_factory=dict)  # directories of the LoRA adapters, by name
    image_inputs: frozenset[str] = frozenset()  # names of what the model takes of images beside ids and mask
    fp8_weights: bool = False  # whether the weights of linear layers were quantised when the model was loaded
    kv_cache_dtype: str = "auto"  # format of stored keys and values; see `EngineOptions`


@dataclass(frozen=True)
class LoadingStage:
    """What an engine does before it answers with its `EngineFacts`."""

    doing: str  # such as "loading"; see `EngineProcess.doing`


class EngineEndedError(ReDrafterError):
    """The engine's process has ended by itself."""


class Channel:
    """One end of the connection between a server and its engine: messages as pickles, in frames over a socket.

    A thread of its own sends them, so that a sender never waits for the other end. Both ends are processes of one
    program. Nobody else may reach the socket: who writes a pickle may run any code.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection  # closed by `close`
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="redrafter-channel", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message, from any thread. What the other end can no longer receive is dropped."""
        self._messages.put(message)

    def receive(self) -> Any:
        """Wait for the next message, in one thread at a time, or raise `EOFError` if either end is closed."""
        try:
            return pickle.loads(receive_frame(self._connection))
        except OSError as error:
            raise EOFError("this end is closed") from error

    def close(self, flush_seconds: float = 0.0) -> None:
        """Close this end, which `receive` hears at both ends, once all is sent or so many seconds have passed."""
        self._messages.put(None)
        self._writer.join(timeout=flush_seconds)
        with suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):  # the other end is gone, of which `receive` tells
            while (message := self._messages.get()) is not None:
                send_frame(self._connection, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class EngineProcess:
    """The engine's process, which ends once its `channel` is closed, and so with this process at the latest."""

    def __init__(self, request: LoadEngine) -> None:
        connection, self._process = start_interpreter(PROGRAM)
        self.channel = Channel(connection)
        self.doing = "loading"  # what it does until it is loaded, as its last `LoadingStage` names it
        self.channel.send(request)

    def wait_until_loaded(self) -> EngineFacts:
        """Wait until the engine is loaded, and return what it says of itself, or raise why it cannot be loaded."""
        try:
            answer: EngineFacts | LoadingStage | ReDrafterError = self.channel.receive()
            while isinstance(answer, LoadingStage):
                self.doing, answer = answer.doing, self.channel.receive()
        except EOFError:
            raise EngineEndedError(f"{self.describe_end()}: nothing is served") from None
        if isinstance(answer, ReDrafterError):
            raise answer
        return answer

    def end(self) -> None:
        """Wait until the process has ended, once the connection is closed, and end it by force if it does not."""
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the connection, and end the process at once if it has not ended."""
        self.channel.close()
        self._process.kill()
        self._process.wait()

    def describe_end(self) -> str:
        """Wait until the process, whose end of the connection is closed, has ended by itself, and return how."""
        try:
            code = self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine has failed, and its process does not end"
        if code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system ends one that takes too much memory" if -code == signal.SIGKILL else ""
            return f"the engine's process was ended by {name}{hint}"
        return f"the engine's process ended with code {code}"
