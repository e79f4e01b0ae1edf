"""Connections to processes for input of strangers: when they end, and when a process stops within a message."""

import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from redrafter.sandbox.process import ForkServer, SandboxedProcess, shut_down, wait_for_end


@pytest.mark.parametrize("end", ["shut down", "closed"])
def test_a_connection_ends_where_either_end_does_and_not_with_data(end):
    ours, theirs = Pipe()
    theirs.send_bytes(b"x")
    assert not wait_for_end(ours, 0.01)
    assert ours.recv_bytes() == b"x"
    heard: list[BaseException] = []

    def listen() -> None:
        try:
            ours.recv_bytes()
        except EOFError as error:
            heard.append(error)

    waiting = threading.Thread(target=listen)
    waiting.start()
    if end == "closed":
        theirs.close()
    else:
        shut_down(ours)
    assert wait_for_end(ours, 60)
    waiting.join(60)
    assert len(heard) == 1
    ours.close()
    shut_down(ours)  # has no effect any more


def prepare(direction: str) -> Callable[[Connection], None]:
    """Prepare a process that stops itself after half of a message, or before it reads any."""

    def stop(connection: Connection) -> None:
        connection.send_bytes(b"%d" % os.getpid())
        if direction == "receives":
            os.write(connection.fileno(), struct.pack("!i", 100) + b"half")
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such processes")
@pytest.mark.parametrize("direction", ["receives", "sends"])
def test_a_process_that_stops_within_a_message_does_not_block_the_program(monkeypatch, direction):
    monkeypatch.setattr("redrafter.sandbox.process.STALL_SECONDS", 0.2)
    server = ForkServer("tests.sandbox.test_process", direction)
    process, outcome = SandboxedProcess(lambda: server), list[BaseException]()
    stopped = int(process.receive(60))

    def exchange() -> None:
        try:
            process.receive(60) if direction == "receives" else process.connection.send_bytes(bytes(1 << 22))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(10)
    blocked = thread.is_alive()
    os.kill(stopped, signal.SIGKILL)
    thread.join(10)
    server.end()
    assert not blocked
    assert len(outcome) == 1
