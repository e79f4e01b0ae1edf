"""One end of the line between a server and its engine: messages as pickles, in frames over a socket."""

import pickle
import queue
import socket
import threading
from contextlib import suppress
from typing import Any

from redrafter.sandbox.frames import receive_frame, send_frame

__all__ = ["Channel"]


class Channel:
    """Sends messages in a thread of its own, so that a sender never waits for the other end.

    Both ends are processes of one program. Nobody else may reach the socket: who writes a pickle may run any code.
    """

    def __init__(self, connection: socket.socket):
        """Take over a connected socket, which is closed by `close`."""
        self._connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="redrafter-channel", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message, from any thread. What the other end can no longer receive is dropped."""
        self._messages.put(message)

    def receive(self) -> Any:
        """Wait for the next message, in one thread at a time.

        Raises:
            EOFError: Either end is closed.
        """
        try:
            return pickle.loads(receive_frame(self._connection))
        except OSError as error:
            raise EOFError("this end is closed") from error

    def close(self, flush_seconds: float = 0.0) -> None:
        """Close this end, which the other end's `receive` and that of this end hear as the end.

        Args:
            flush_seconds: Seconds for which to wait until all messages are sent.
        """
        self._messages.put(None)
        self._writer.join(timeout=flush_seconds)
        with suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):  # the other end is gone, of which `receive` tells
            while (message := self._messages.get()) is not None:
                send_frame(self._connection, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
