"""The zygotes of a program, as the program sees them: one for each tokenizer, replaced if it has died."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from redrafter.errors import ArgumentError, MissingDependencyError, ReDrafterError
from redrafter.grammar.wire import receive_frame, send_frame

__all__ = ["Zygote", "connect", "zygote_for"]

# Modules are found on this program's path and not in its working directory.
ZYGOTE_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from redrafter.grammar.zygote import main; main(int(sys.argv[1]))"
)
# One thread needs one arena of memory and one worker. Rust's messages are read as one line, without a backtrace.
ZYGOTE_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
START_TIMEOUT_SECONDS = 120.0  # for a zygote to read a tokenizer
FORK_TIMEOUT_SECONDS = 30.0  # for a zygote to fork

_zygotes: "WeakKeyDictionary[Any, Zygote]" = WeakKeyDictionary()
_starting = threading.Lock()


def connect(tokenizer: Any) -> socket.socket:
    """Return a connection to a new process for one grammar over a tokenizer's vocabulary.

    Raises:
        MissingDependencyError: llguidance is not installed, or the system is Windows.
        ArgumentError: llguidance cannot read the tokenizer.
        ReDrafterError: No process can be started.
    """
    for _ in range(2):  # a second time if the zygote has died
        zygote = zygote_for(tokenizer)
        connection = zygote.fork()
        if connection is not None:
            return connection
        zygote.end()
    raise ReDrafterError("no process can be started for a grammar: the machine has no room for one")


def zygote_for(tokenizer: Any) -> "Zygote":
    """Return the zygote of a tokenizer, a new one if there is none or it has died; the exceptions are `connect`'s."""
    if sys.platform == "win32":
        raise MissingDependencyError("grammars need sockets that Windows has not: use Linux or macOS")
    if find_spec("llguidance") is None:
        raise MissingDependencyError("grammars need llguidance: pip install 'redrafter[guided]'")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("only fast tokenizers are supported")
    with _starting:
        zygote = _zygotes.get(tokenizer)
        if zygote is None or not zygote.alive:
            zygote = _zygotes[tokenizer] = Zygote(backend.to_str(), tokenizer.eos_token_id)
        return zygote


class Zygote:
    """A process that forks the processes of grammars over one vocabulary."""

    def __init__(self, tokenizer: str, end_token: int | None) -> None:
        """Start the process, and wait until it has read the tokenizer.

        Args:
            tokenizer: The tokenizer as `tokenizers` writes it to a file.
            end_token: Id of the tokenizer's EOS token; None if it has none.
        """
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    ZYGOTE_PROGRAM,
                    str(theirs.fileno()),
                    *(path or os.getcwd() for path in sys.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | ZYGOTE_ENVIRONMENT,
            )
        self._owner, self._sending = os.getpid(), threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._control, self._process, self._owner)
        self._control.settimeout(START_TIMEOUT_SECONDS)
        try:
            send_frame(self._control, json.dumps(end_token).encode())
            send_frame(self._control, tokenizer.encode())
            reply = receive_frame(self._control)
        except (EOFError, OSError) as error:
            self.end()
            raise ReDrafterError("the process that grammars are read in did not start; it says why above") from error
        if reply.startswith(b"import"):
            self.end()
            raise MissingDependencyError(
                f"grammars need llguidance, which cannot be imported: {reply[6:].decode()}; "
                "pip install 'redrafter[guided]'"
            )
        if reply:
            self.end()
            raise _unreadable(reply[7:].decode())

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can fork for this process; it cannot for a process that was forked from this one."""
        return self._finalizer.alive and self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> socket.socket | None:
        """Return a connection to a new child; None if the zygote has died or cannot fork."""
        ours, theirs = socket.socketpair()
        ours.settimeout(FORK_TIMEOUT_SECONDS)
        try:
            with theirs, self._sending:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            receive_frame(ours)
        except (EOFError, OSError):
            ours.close()
            return None
        return ours

    def end(self) -> None:
        """End the process; the processes that it forked go on."""
        self._finalizer()


def _end(control: socket.socket, process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Close the control socket and kill the process; in a fork of the owner, only close the copy of the socket."""
    control.close()
    if os.getpid() == owner:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def _unreadable(why: str) -> ArgumentError:
    """Make the error for a tokenizer that llguidance cannot read."""
    return ArgumentError(f"grammar: no grammar can be written with this tokenizer: {' '.join(why.split()):.300}")
