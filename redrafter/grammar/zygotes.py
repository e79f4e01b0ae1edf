"""The zygotes of a program, seen from the program: one for each tokenizer, replaced where it died."""

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

__all__ = ["Zygote", "connect"]

# Modules are found where this program finds them, and not where it happens to stand.
ZYGOTE_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from redrafter.grammar.zygote import main; main(int(sys.argv[1]))"
)
# No memory is set aside for threads that there are none of; what Rust says is read as one line.
ZYGOTE_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
START_TIMEOUT_SECONDS = 120.0  # seconds in which a zygote must have read a tokenizer
FORK_TIMEOUT_SECONDS = 30.0  # seconds in which it must have forked

_zygotes: "WeakKeyDictionary[Any, Zygote]" = WeakKeyDictionary()
_starting = threading.Lock()


def connect(tokenizer: Any) -> socket.socket:
    """Return a connection to a new process for one grammar over this tokenizer's vocabulary.

    Raises `MissingDependencyError` without llguidance, `ArgumentError` for a tokenizer that it cannot read.
    """
    for _ in range(2):
        zygote = zygote_for(tokenizer)
        connection = zygote.fork()
        if connection is not None:
            return connection
        zygote.end()
    raise ReDrafterError("no process can be started for a grammar: the machine has no room for one")


def zygote_for(tokenizer: Any) -> "Zygote":
    if sys.platform == "win32":
        raise MissingDependencyError("grammars need sockets that Windows has not: use Linux or macOS")
    if find_spec("llguidance") is None:
        raise MissingDependencyError("grammars need llguidance: pip install 'redrafter[guided]'")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unreadable("only fast tokenizers are supported")
    with _starting:
        found = _zygotes.get(tokenizer)
        if found is None or not found.alive:
            found = _zygotes[tokenizer] = Zygote(backend.to_str(), tokenizer.eos_token_id)
        return found


class Zygote:
    """A process that forks the processes of grammars over one vocabulary."""

    def __init__(self, tokenizer: str, end_token: int | None) -> None:
        """Start it.

        Args:
            tokenizer: the tokenizer as `tokenizers` writes it to a file.
            end_token: the token that ends its texts, if it has one.
        """
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    ZYGOTE_PROGRAM,
                    str(theirs.fileno()),
                    *(place or os.getcwd() for place in sys.path),
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
            said = receive_frame(self._control)
        except (EOFError, OSError) as error:
            self.end()
            raise ReDrafterError("the process that grammars are read in did not start; it says why above") from error
        if said.startswith(b"import"):
            self.end()
            raise MissingDependencyError(
                f"grammars need llguidance, which cannot be imported: {said[6:].decode()}; "
                "pip install 'redrafter[guided]'"
            )
        if said:
            self.end()
            raise _unreadable(said[7:].decode())

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can fork, for this process and not for one that was forked from it."""
        return self._finalizer.alive and self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> socket.socket | None:
        """Return a connection to a new child, None where the zygote has died or cannot fork."""
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
        """End it. The processes that it forked go on."""
        self._finalizer()


def _end(control: socket.socket, process: "subprocess.Popen[bytes]", owner: int) -> None:
    control.close()
    if os.getpid() == owner:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def _unreadable(why: str) -> ArgumentError:
    return ArgumentError(f"grammar: no grammar can be written with this tokenizer: {' '.join(why.split()):.300}")
