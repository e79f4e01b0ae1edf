"""Frames of bytes on a socket: a length in bytes, a native uint32, and then the content."""

import socket
import struct

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
