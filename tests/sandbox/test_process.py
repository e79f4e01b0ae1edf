"""Connections to processes for input of strangers: when they end."""

import threading
from multiprocessing import Pipe

import pytest

from redrafter.sandbox.process import shut_down, wait_for_end


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
