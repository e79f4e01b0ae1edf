"""Bytes that are no good HTTP, for fuzz_server.py: what is sent, how, and which statuses came back."""

import random
import re
import socket
import struct
import time
from urllib.parse import urlsplit

__all__ = ["ATTACKS", "attack"]

BODY = b'{"prompt": "Hello", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
STREAM = b'{"prompt": "Hello", "max_tokens": 300, "ignore_eos": true, "stream": true}'
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"

# By name: the bytes, in pieces between which a moment passes.
ATTACKS: dict[str, list[bytes]] = {
    "half a request line": [b"POST /v1/comp"],
    "half a header": [POST[:-20]],
    "headers without an end": [POST, b"X-A: b\r\n", b"X-C: d\r\n"],
    "half a body": [WHOLE[:-10]],
    "a body that comes slowly": [WHOLE[:-30], *(bytes([byte]) for byte in WHOLE[-30:])],
    "garbage": [bytes(range(256)) * 8],
    "another protocol": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200],
    "a version that is none": [WHOLE.replace(b"HTTP/1.1", b"HTTP/9.9")],
    "a method that is none": [WHOLE.replace(b"POST", b"P\x00ST")],
    "a long path": [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"],
    "a path of zeros": [b"GET /\x00\x00 HTTP/1.1\r\nHost: a\r\n\r\n"],
    "a path of another's": [b"GET http://elsewhere/%2e%2e/%ff%00 HTTP/1.1\r\nHost: a\r\n\r\n"],
    "a path below a model": [b"GET /v1/models/%00%ff..%2f HTTP/1.1\r\nHost: a\r\n\r\n"],
    "a huge header": [POST + b"X-A: " + b"a" * 200_000 + b"\r\n\r\n"],
    "many headers": [POST + b"".join(b"X-%d: a\r\n" % n for n in range(3000)) + b"\r\n"],
    "a header of odd bytes": [POST + b"X-Request-Id: \xff\xfe\x80\r\nContent-Length: 2\r\n\r\n{}"],
    "a folded header": [POST + b"X-A: a\r\n b\r\nContent-Length: 2\r\n\r\n{}"],
    "two lengths": [POST + b"Content-Length: 2\r\nContent-Length: 30\r\n\r\n{}"],
    "a negative length": [POST + b"Content-Length: -5\r\n\r\n{}"],
    "a length that is no number": [POST + b"Content-Length: abc\r\n\r\n{}"],
    "a length with a sign": [POST + b"Content-Length: +2\r\n\r\n{}"],
    "a length with a line": [POST + b"Content-Length: 1_0\r\n\r\n{}"],
    "a length beyond all": [POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"],
    "a length that is too small": [POST + b"Content-Length: 5\r\n\r\n" + BODY],
    "length and chunks": [CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\nHost: a\r\n\r\n"],
    "chunks of odd sizes": [CHUNKED + b"\r\n-5\r\nabc\r\n0\r\n\r\n"],
    "a chunk beyond all": [CHUNKED + b"\r\nffffffffffffffffff\r\n{}"],
    "chunks in chunks": [CHUNKED + b"Transfer-Encoding: identity, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
    "chunks without an end": [CHUNKED + b"\r\n", *([b"1\r\n{\r\n"] * 20)],
    "many at once": [WHOLE * 8],
    "a key of odd bytes": [POST + b"Authorization: Bearer \xff\xe9\r\nContent-Length: 2\r\n\r\n{}"],
    "an upgrade": [b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
    "another upgrade": [b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"],
    "a stream that nobody reads on": [POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM],
}


def attack(url: str, name: str, made: random.Random) -> list[int]:
    """Send one attack and leave, politely or not. Returns the statuses that came back."""
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    found = b""
    try:
        with socket.create_connection((where.hostname, where.port), timeout=5) as connection:
            for piece in ATTACKS[name]:
                connection.sendall(piece)
                time.sleep(0.002)
            connection.settimeout(made.choice((0.05, 0.3, 1.0)))
            if made.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leave at once
            elif made.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            for _ in range(made.choice((1, 3, 50))):
                more = connection.recv(4096)
                found += more
                if not more:
                    break
    except OSError:
        pass  # closed, or silent for as long as we listen: neither is an answer
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", found)]
