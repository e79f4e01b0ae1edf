"""Notice that another process of a training has ended, on whatever machine, and end too.

A process that waits in a collective for one that has ended fails with a traceback of the library that it waits in, or
waits for minutes. So each process is connected to the first one, and the system closes the connection of a process that
ends, however it ends. The one process that is to say so prints a line, and all end with exit code 2.
"""

import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from redrafter.app.program import print_message
from redrafter.errors import ArgumentError, ReDrafterError, first_line

__all__ = ["watch_processes"]

# What a process says before it closes its connection.
DONE = b"d"  # the training is done
FAILED = b"f"  # the process prints why it failed
LOST = b"l"  # another process was lost, and the first process has said so
TOKEN_BYTES = 16
CONNECT_SECONDS = 60.0
GREETING_SECONDS = 5.0  # that a connection may take to say whose it is
ERROR_SECONDS = 5.0  # that an error waits to learn whether it comes of a lost process
# Of a machine that is gone without a word: seconds until it is asked, between questions, and how many questions.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@contextmanager
def watch_processes(accelerator: Accelerator) -> Iterator[None]:
    """End this process while the block runs if another one ends before its own block has. Collective.

    Args:
        accelerator: Processes that train together.

    Raises:
        ArgumentError: They cannot connect to the first one.
    """
    if accelerator.num_processes == 1:
        yield
        return
    try:
        connections = _connect(accelerator)
    except OSError as error:
        raise ArgumentError(
            f"the processes cannot connect to the first one at {os.environ['MASTER_ADDR']}: {first_line(error)}; let "
            "the machines reach each other on every port"
        ) from error
    watch = _Watch(accelerator.process_index, accelerator.num_processes, connections)
    try:
        yield
    except (ReDrafterError, KeyboardInterrupt, SystemExit):
        watch.stop(FAILED)
        raise
    except BaseException:
        watch.lost.wait(ERROR_SECONDS)
        if watch.lost.is_set():  # the error comes of it, and the thread ends the process
            watch.thread.join()
        watch.stop(FAILED)
        raise
    watch.stop(DONE)


class _Watch:
    """A thread that reads the connections of this process.

    Args:
        rank: Rank of this process.
        count: Processes that train together.
        connections: Connections by rank: of the first process those to all others, of others that to the first one.

    Attributes:
        lost: Set once a process was lost.
        thread: The thread.
    """

    def __init__(self, rank: int, count: int, connections: dict[int, socket.socket]):
        self.rank, self.count, self.connections = rank, count, connections
        self.lost = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watch processes", daemon=True)
        self.thread.start()

    def stop(self, word: bytes) -> None:
        """Tell the other processes that this one is about to end."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(word)

    def _watch(self) -> None:
        """Read what the others say, until all are done or one is lost."""
        said = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as selector:
            for rank, connection in self.connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank, word = key.data, _receive(self.connections[key.data])
                    said[rank] = word or said[rank]
                    if word == DONE:
                        selector.unregister(self.connections[rank])
                    elif not word or word == LOST:
                        self._end(rank, said[rank])

    def _end(self, lost_rank: int, word: bytes) -> None:
        """End this process because another one has ended.

        Args:
            lost_rank: Rank of the process.
            word: The last thing that it said; nothing where it was killed.
        """
        self.lost.set()
        says_so = self.rank == 0 or (self.rank == 1 and lost_rank == 0)
        if says_so and not word:
            print_message(
                "error",
                f"process {lost_rank} of {self.count} (from 0) has ended before the training was done; start all of "
                "them again, with --resume where there are checkpoints",
            )
        self.stop(LOST)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(2)  # the main thread may wait for the process that was lost


def _receive(connection: socket.socket) -> bytes:
    """Return the next word of another process; nothing where it has ended."""
    try:
        return connection.recv(1)
    except OSError:
        return b""


def _connect(accelerator: Accelerator) -> dict[int, socket.socket]:
    """Connect every process with the first one. Collective: call it on every rank.

    Returns:
        Connections by the rank of the process at their other end.
    """
    host = os.environ["MASTER_ADDR"]  # where launchers run the first process
    family = socket.getaddrinfo(host, None)[0][0]
    if not accelerator.is_main_process:
        port, token = _broadcast([None, None])
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.sendall(token + accelerator.process_index.to_bytes(4, "big"))
        return {0: _keep_alive(connection)}
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), family=family, backlog=accelerator.num_processes) as server:
        _, token = _broadcast([server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES)])
        server.settimeout(CONNECT_SECONDS)
        while len(connections) < accelerator.num_processes - 1:
            connection, _ = server.accept()
            connection.settimeout(GREETING_SECONDS)
            greeting = b""
            with suppress(OSError):
                greeting = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if secrets.compare_digest(greeting[:TOKEN_BYTES], token):
                connections[int.from_bytes(greeting[TOKEN_BYTES:], "big")] = _keep_alive(connection)
            else:  # a stranger
                connection.close()
    return connections


def _broadcast(values: list[Any]) -> list[Any]:
    """Broadcast some objects from rank 0. Collective: call it on every rank."""
    received: list[Any] = broadcast_object_list(values)
    return received


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Have the system notice within half a minute that the machine at the other end is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
