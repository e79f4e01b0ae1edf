"""This side: a fork server for each kind of work, restarted if it has died, and the processes that it forks.

multiprocessing's forkserver does not serve here: its children inherit only imported modules and import the program's
main module, so a script without a main guard, or one read from stdin, would fail; and each process of a grammar would
read the vocabulary again, which takes 2.8 s for 128,000 tokens, where a fork of a server that has read it takes 13 ms.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any
from weakref import WeakKeyDictionary

from redrafter.errors import ReDrafterError

SERVER_PROGRAM = "from redrafter.sandbox.child import main; main(int(sys.argv[1]), sys.argv[2])"
# One thread needs one memory arena and one worker. Rust's messages are read as one line, without a backtrace.
SERVER_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
START_TIMEOUT_SECONDS = 120.0  # for a server to prepare
FORK_TIMEOUT_SECONDS = 30.0  # for a server to fork
STALL_SECONDS = 10.0  # within a message, without one more byte of it sent or received
MAX_ANSWER_BYTES = 1 << 30  # a damaged or hostile length must not allocate more

_servers: "WeakKeyDictionary[Any, ForkServer]" = WeakKeyDictionary()
_starting = threading.Lock()


class NotPreparedError(ReDrafterError):
    """A fork server could not prepare its kind of work."""


def start_interpreter(program: str, *words: str, **options: Any) -> "tuple[Connection, subprocess.Popen[bytes]]":
    """Run a program in a fresh interpreter, with options of `Popen`, and return a connection to it and its process.

    `sys` is imported; `sys.argv` has the descriptor of the connection's other end, then the words. Modules are found on
    this program's path, not in its working directory.
    """
    ours, theirs = Pipe()
    with theirs:
        code = f"import sys; sys.path[:] = {[path or os.getcwd() for path in sys.path]!r}; {program}"
        command = [sys.executable, "-c", code, str(theirs.fileno()), *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], **options)
    return ours, process


def wait_for_end(connection: Connection, seconds: float | None = None) -> bool:
    """Wait until either end of a connection is closed or shut down; return False if `seconds` pass before."""
    watch = select.poll()
    watch.register(connection, 0)  # no event but the end
    return bool(watch.poll(None if seconds is None else seconds * 1000))


def shut_down(connection: Connection) -> None:
    """End a connection from any thread: both ends, even where they wait for a message, raise `EOFError`."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class ForkServer:
    """A process that has prepared one kind of work and forks a process for each piece of it."""

    def __init__(self, module: str, *arguments: object) -> None:
        """Start the process, and wait until it has called a module's function `prepare` with the arguments.

        Raises `NotPreparedError` if that has failed, and `ReDrafterError` if no process can be started.
        """
        self._control, self._process = start_interpreter(
            SERVER_PROGRAM, module, stdout=subprocess.DEVNULL, env=os.environ | SERVER_ENVIRONMENT
        )
        self._owner, self._sending = os.getpid(), threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._control, self._process, self._owner)
        try:
            self._control.send(arguments)
            error = _receive(self._control, START_TIMEOUT_SECONDS).decode()
        except (EOFError, OSError) as failure:
            self.end()
            raise ReDrafterError(f"the process of {module} did not start; it says why above") from failure
        if error:
            self.end()
            raise NotPreparedError(error)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether it can fork for this process; impossible for a fork of this process."""
        return self._finalizer.alive and self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> Connection | None:
        """Return a connection to a new child; None if the server has died or cannot fork."""
        ours, theirs = Pipe()
        try:
            # The server reads one connection per message, so two threads must not interleave theirs.
            _limit_stalls(ours)
            with theirs, self._sending:
                send_handle(self._control, theirs.fileno(), self.pid)
            _receive(ours, FORK_TIMEOUT_SECONDS)
        except (EOFError, OSError):
            ours.close()
            return None
        return ours

    def end(self) -> None:
        """End the process; the processes that it forked continue."""
        self._finalizer()


def server_of(key: Any, start: Callable[[], ForkServer]) -> ForkServer:
    """Return the server of an object, started by `start` if there is none or it has died. It ends with the object."""
    with _starting:
        server = _servers.get(key)
        if server is None or not server.alive:
            server = _servers[key] = start()
        return server


class SandboxedProcess:
    """A process for one piece of work, and the `connection` to it. It ends with this object, or by `end`."""

    def __init__(self, find_server: Callable[[], ForkServer]) -> None:
        """Fork from the server, which is restarted if it has died."""
        for _ in range(2):  # a second time if the server has died
            server = find_server()
            connection = server.fork()
            if connection is not None:
                break
            server.end()
        else:
            raise ReDrafterError("no process can be started: the machine has no room for one")
        self.connection, self._owner = connection, os.getpid()

    @property
    def alive(self) -> bool:
        """Return whether this process can query the other one; impossible for a fork of this process."""
        return self._owner == os.getpid() and not wait_for_end(self.connection, 0.0)

    def receive(self, seconds: float) -> bytes:
        """Return its next message; raises `OSError`, or `EOFError`, if it has ended or takes longer."""
        return _receive(self.connection, seconds)

    def end(self) -> None:
        """End the process, from any thread; a thread that waits for an answer gets none."""
        if self._owner == os.getpid():
            shut_down(self.connection)


def _limit_stalls(connection: Connection) -> None:
    """Let a read or write raise `BlockingIOError` after `STALL_SECONDS`: polling only bounds a message's beginning."""
    limit = struct.pack("@ll", *divmod(int(STALL_SECONDS * 1e6), 1_000_000))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


def _receive(connection: Connection, seconds: float) -> bytes:
    ready = select.poll()  # `Connection.poll` takes 20 us
    ready.register(connection, select.POLLIN)
    if not ready.poll(seconds * 1000):
        raise TimeoutError
    return connection.recv_bytes(MAX_ANSWER_BYTES)


def _end(control: Connection, process: "subprocess.Popen[bytes]", owner: int) -> None:
    control.close()  # in a fork of the owner, closes only its copy
    if os.getpid() == owner:
        process.kill()
        process.wait()
