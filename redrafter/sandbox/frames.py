"""Frames of bytes on a socket: a length in bytes, a native uint32, and then the content; and connections for them."""

import socket
import struct
from contextlib import suppress

_LENGTH = struct.Struct("=I")
MAX_FRAME_BYTES = 1 << 30


def send_frame(to: socket.socket, *parts: bytes) -> None:
    """Send a frame of the parts in order; raises `OSError` if the other end is closed."""
    to.sendall(b"".join((_LENGTH.pack(sum(map(len, parts))), *parts)))


def receive_frame(source: socket.socket) -> bytearray:
    """Receive a frame and return its content; raises `EOFError` if the other end is closed."""
    [size] = _LENGTH.unpack(_receive(source, _LENGTH.size))
    # A damaged or hostile length must not allocate gigabytes.
    if size > MAX_FRAME_BYTES:
        raise EOFError("this is no frame")
    return _receive(source, size)


def _receive(source: socket.socket, size: int) -> bytearray:
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        try:
            count = source.recv_into(rest)
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other side is gone")
        rest = rest[count:]
    return received


class FrameSocket(socket.socket):
    """One end of a connection, with a second socket on which nothing is ever sent.

    Attributes:
        life: The second socket, whose only event is that the other end has closed or shut down the connection.
    """

    def __init__(self, descriptor: int, life: int):
        """Take over the descriptors of both sockets."""
        super().__init__(fileno=descriptor)
        self.life = socket.socket(fileno=life)

    @classmethod
    def pair(cls) -> "tuple[FrameSocket, FrameSocket]":
        """Return both ends of a new connection."""
        sockets, lives = socket.socketpair(), socket.socketpair()
        ours, theirs = (cls(end.detach(), life.detach()) for end, life in zip(sockets, lives, strict=True))
        return ours, theirs

    def shutdown(self, how: int) -> None:
        """Shut down both sockets."""
        with suppress(OSError):
            self.life.shutdown(how)
        super().shutdown(how)

    def close(self) -> None:
        """Close both sockets."""
        self.life.close()
        super().close()
