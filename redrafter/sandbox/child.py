"""The zygote: a small process that prepares what all work of one kind needs, and forks a child for each piece of it.

It imports no torch, has one thread and no model, so a fork takes a millisecond and shares what was prepared. A child
ends when the other end of its socket is closed, and the kernel ends it at the limits that it sets itself.
"""

import fcntl
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from redrafter.sandbox.frames import FrameSocket, receive_frame, send_frame


def main(descriptor: int, module: str, count: int) -> None:
    """Prepare one kind of work, then fork a process for each connection received, until the program closes its socket.

    The descriptor is a Unix socket to the program. The module's function `prepare` receives `count` frames, and returns
    the function that a child runs with its connection. An empty frame reports success; otherwise the frame is `import`
    or `reading`, by the kind of failure, and a message.
    """
    # The program's signals are ignored: when it stops, it ends the children by closing their sockets, once their work
    # is no longer needed. The process leaves the program's process group but not its session, since niceness applies
    # among the processes of one session.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgrp()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have none
        file.write("1000")  # so that children are ended before the model when memory runs out
    control = socket.socket(fileno=descriptor)
    try:
        frames = [receive_frame(control) for _ in range(count)]
        try:
            run = importlib.import_module(module).prepare(*frames)
        except ImportError as error:
            return send_frame(control, b"import", str(error).encode(errors="replace"))
        except Exception as error:  # the library documents no class of errors
            return send_frame(control, b"reading", str(error).encode(errors="replace"))
        send_frame(control)
        del frames
        _fork_for_each_connection(control, run)
    except (EOFError, OSError):
        return


def _fork_for_each_connection(control: socket.socket, run: Callable[[FrameSocket], None]) -> None:
    gc.collect()
    gc.freeze()  # so that collections in children do not write to shared pages
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if len(descriptors) < 2:  # the program has closed its socket, or there is no room for more descriptors
            return
        with FrameSocket(*descriptors) as connection:
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
                    send_frame(connection)  # the program waits for it
                    run(connection)
                except (EOFError, OSError):
                    pass  # the program is gone
                finally:
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
def bounded_work(cpu_seconds: float, connection: FrameSocket | None = None) -> Iterator[None]:
    """Let the kernel end this process after some processor time in the context, or once no one waits for it.

    The other end of the connection waits and sends nothing. The process ends when that end is closed, even while Python
    is blocked in a library; None for work too short to need this.
    """
    flags = 0
    if connection is not None:
        flags = fcntl.fcntl(connection.life, fcntl.F_GETFL)
        fcntl.fcntl(connection.life, fcntl.F_SETOWN, os.getpid())
        # The kernel then sends SIGIO when the other end closes, whose default action ends the process. It also sends
        # it for data, perhaps after they were read, so this socket must be one that never has any.
        fcntl.fcntl(connection.life, fcntl.F_SETFL, flags | os.O_ASYNC)
        watch = select.poll()
        watch.register(connection.life, 0)  # reports only the closing of the other end
        if watch.poll(0):
            raise EOFError("the other side is gone")
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if connection is not None:
            fcntl.fcntl(connection.life, fcntl.F_SETFL, flags)
