"""The fork server: a small process that prepares what all work of one kind needs, and forks a child for each piece.

It imports no torch, has one thread and no model, so a fork takes a millisecond and shares what was prepared. A child
ends when the other end of its connection is closed, and the kernel ends it at the limits that it sets itself.
"""

import gc
import importlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from redrafter.sandbox.process import wait_for_end


def main(descriptor: int, module: str) -> None:
    """Prepare one kind of work, then fork a process for each connection received, until the program closes its own.

    The descriptor is a connection to the program, which sends the arguments of the module's function `prepare`. That
    returns the function that a child runs with its connection. The answer is an error, or empty.
    """
    # The program's signals are ignored: when it stops, it ends the children by closing their connections, once their
    # work is no longer needed. The process leaves the program's process group but not its session, since niceness
    # applies among the processes of one session.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have none
        file.write("1000")  # so that children are ended before the model when memory runs out
    control = Connection(descriptor)
    with suppress(EOFError, OSError):  # the program has closed its end
        arguments = control.recv()
        try:
            run = importlib.import_module(module).prepare(*arguments)
        except Exception as error:  # libraries document no class of errors
            return control.send_bytes(f"{type(error).__name__}: {error}".encode(errors="replace"))
        del arguments
        control.send_bytes(b"")
        _fork_for_each_connection(control, run)


def _fork_for_each_connection(control: Connection, run: Callable[[Connection], None]) -> None:
    gc.collect()
    gc.freeze()  # so that collections in children do not write to shared pages
    while True:
        with Connection(recv_handle(control)) as connection:
            try:
                child = os.fork() == 0
            except OSError:
                continue  # leaving the context closes the connection, which signals the end to the program
            if child:
                control.close()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)  # Rust would print a backtrace to stderr when memory runs out
                os.close(null)
                try:
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
                    connection.send_bytes(b"")  # the program waits for it
                    run(connection)
                except (EOFError, OSError):
                    pass  # the program is gone
                finally:
                    os._exit(0)


def _end_with(connection: Connection) -> None:
    """Exit once no one waits for the work, even while a library computes, as long as it releases the GIL."""
    wait_for_end(connection)
    os._exit(0)


def limit_memory(count: int) -> None:
    """Let this process reserve at most this number of bytes in addition to those already reserved, on Linux."""
    if reserved := memory()[0]:
        resource.setrlimit(resource.RLIMIT_AS, (reserved + count, reserved + count))


def memory() -> tuple[int, int]:
    """Return the bytes of address space that this process has reserved, and the bytes it holds; 0 outside Linux."""
    if sys.platform != "linux":
        return 0, 0
    with open("/proc/self/statm") as file:
        reserved, held = file.read().split()[:2]
    return int(reserved) * resource.getpagesize(), int(held) * resource.getpagesize()


@contextmanager
def bounded_work(cpu_seconds: float) -> Iterator[None]:
    """Let the kernel end this process after some processor time in the context."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
