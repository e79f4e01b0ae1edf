"""This side: a zygote for each kind of work, restarted if it has died, and the processes that it forks.

multiprocessing's forkserver does not serve here: its children inherit only imported modules and import the program's
main module, so a script without a main guard, or one read from stdin, would fail; and each process of a grammar would
read the vocabulary again, which takes 2.8 s for 128,000 tokens, where a fork of a zygote that has read it takes 13 ms.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from redrafter.errors import ReDrafterError
from redrafter.sandbox.frames import FrameSocket, receive_frame, send_frame

ZYGOTE_PROGRAM = "from redrafter.sandbox.child import main; main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
# One thread needs one memory arena and one worker. Rust's messages are read as one line, without a backtrace.
ZYGOTE_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
START_TIMEOUT_SECONDS = 120.0  # for a zygote to prepare
FORK_TIMEOUT_SECONDS = 30.0  # for a zygote to fork

_zygotes: "WeakKeyDictionary[Any, Zygote]" = WeakKeyDictionary()
_starting = threading.Lock()


class NotPreparedError(ReDrafterError):
    """A zygote could not prepare its kind of work; `missing` is true if a package is missing."""

    def __init__(self, message: str, missing: bool = False):
        super().__init__(message)
        self.missing = missing


def start_interpreter(program: str, *words: str, **options: Any) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Run a program in a fresh interpreter, with options of `Popen`, and return a socket to it and its process.

    `sys` is imported; `sys.argv` has the descriptor of the socket's other end, then the words. Modules are found on
    this program's path, not in its working directory.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        code = f"import sys; sys.path[:] = {[path or os.getcwd() for path in sys.path]!r}; {program}"
        command = [sys.executable, "-c", code, str(theirs.fileno()), *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], **options)
    return ours, process


class Zygote:
    """A process that has prepared one kind of work and forks a process for each piece of it."""

    def __init__(self, module: str, frames: Sequence[bytes]) -> None:
        """Start the process, and wait until it has prepared by calling a module's function `prepare` with the frames.

        Raises `NotPreparedError` if that has failed, and `ReDrafterError` if no process can be started.
        """
        self._control, self._process = start_interpreter(
            ZYGOTE_PROGRAM, module, str(len(frames)), stdout=subprocess.DEVNULL, env=os.environ | ZYGOTE_ENVIRONMENT
        )
        self._owner, self._sending = os.getpid(), threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._control, self._process, self._owner)
        self._control.settimeout(START_TIMEOUT_SECONDS)
        try:
            for frame in frames:
                send_frame(self._control, frame)
            reply = receive_frame(self._control)
        except (EOFError, OSError) as error:
            self.end()
            raise ReDrafterError(f"the process of {module} did not start; it says why above") from error
        if reply:
            self.end()
            missing = reply.startswith(b"import")
            raise NotPreparedError(reply[6 if missing else 7 :].decode(), missing)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether it can fork for this process; impossible for a fork of this process."""
        return self._finalizer.alive and self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> FrameSocket | None:
        """Return a connection to a new child; None if the zygote has died or cannot fork."""
        ours, theirs = FrameSocket.pair()
        ours.settimeout(FORK_TIMEOUT_SECONDS)
        try:
            # The zygote reads one connection per message, so two threads must not interleave theirs.
            with theirs, self._sending:
                socket.send_fds(self._control, [b"+"], [theirs.fileno(), theirs.life.fileno()])
            receive_frame(ours)
        except (EOFError, OSError):
            ours.close()
            return None
        return ours

    def end(self) -> None:
        """End the process; the processes that it forked continue."""
        self._finalizer()


def zygote_of(key: Any, start: Callable[[], Zygote]) -> Zygote:
    """Return the zygote of an object, started by `start` if there is none or it has died. It ends with the object."""
    with _starting:
        zygote = _zygotes.get(key)
        if zygote is None or not zygote.alive:
            zygote = _zygotes[key] = start()
        return zygote


class SandboxedProcess:
    """A process for one piece of work, and the `connection` to it. It ends with this object, or by `end`."""

    def __init__(self, find_zygote: Callable[[], Zygote]) -> None:
        """Fork from the zygote, which is restarted if it has died."""
        for _ in range(2):  # a second time if the zygote has died
            zygote = find_zygote()
            connection = zygote.fork()
            if connection is not None:
                break
            zygote.end()
        else:
            raise ReDrafterError("no process can be started: the machine has no room for one")
        self.connection, self._owner, self.ended = connection, os.getpid(), False
        weakref.finalize(self, _close, connection, self._owner)

    @property
    def alive(self) -> bool:
        """Return whether this process can query the other one; impossible for a fork of this process."""
        if self.ended or not self.owned:
            return False
        watch = select.poll()
        watch.register(self.connection, 0)  # no event but the closing of the other end
        return not watch.poll(0)

    @property
    def owned(self) -> bool:
        """Return whether this process has started it; a process forked from this one has not."""
        return self._owner == os.getpid()

    def end(self) -> None:
        """End the process, from any thread; a thread that waits for an answer gets none."""
        self.ended = True
        if self.owned:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


def _end(control: socket.socket, process: "subprocess.Popen[bytes]", owner: int) -> None:
    control.close()  # in a fork of the owner, closes only its copy
    if os.getpid() == owner:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def _close(connection: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # in a fork of the owner, only its copy is closed
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()
