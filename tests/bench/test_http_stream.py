"""The connection of the load generator: answers of every framing, and those that are broken."""

import asyncio
import json

import pytest

from helpers.stub_server import DROP, StubServer, reply, stream
from redrafter import ArgumentError
from redrafter.bench.http_stream import Address, Connection, EventLines, RequestFailedError


def ask(url: str, times: int = 1, pause: float = 0.0) -> list[bytes]:
    """Ask over one connection, and return the bodies of the answers."""

    async def run() -> list[bytes]:
        connection, bodies = Connection(Address.parse(url)), []
        for _ in range(times):
            pieces: list[bytes] = []
            await connection.request("POST", "/v1/completions", b"{}", pieces.append)
            bodies.append(b"".join(pieces))
            if pause:  # a sleep of none would let an end of the connection be seen too
                await asyncio.sleep(pause)
        connection.close()
        return bodies

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", False)),
        ("http://localhost:8000/v1/", ("http://localhost:8000", "localhost", 8000, "", False)),
        ("https://a.example.org/proxy/v1", ("https://a.example.org/proxy", "a.example.org", 443, "/proxy", True)),
        ("http://[::1]", ("http://[::1]", "::1", 80, "", False)),
    ],
)
def test_an_address_is_read_from_a_url(url, address):
    assert Address.parse(url) == Address(*address)


WRONG = ("", "localhost:8000", "ftp://a", "http://", "http://a:70000", "http://me:secret@a", "http://a/?b=c")


@pytest.mark.parametrize("url", [*WRONG, "http://a b", "http://ä"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ArgumentError, match="--url"):
        Address.parse(url)


@pytest.mark.parametrize(
    "answer",
    [
        reply(b"hello world"),
        stream(b"hello", b" world"),
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\nB;a=b\r\nhello", b" world\r\n0\r\nX: y\r\n\r\n"],
        [b"HTTP/1.0 200 OK\r\n\r\nhello", 0.01, b" world", DROP],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello world", DROP],
    ],
)
def test_bodies_of_every_framing_are_read_twice(answer):
    with StubServer(lambda _: answer) as server:
        assert ask(server.url, 2) == [b"hello world"] * 2


def test_a_connection_is_kept_until_the_server_closes_it():
    with StubServer(lambda _: stream(b"a")) as server:
        ask(server.url, 5)
        assert server.connections == 1
    with StubServer(lambda _: [*reply(b"a"), DROP]) as server:
        ask(server.url, 2, pause=0.1)
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(json.dumps({"error": {"message": "too\nlong"}}).encode(), 400), "HTTP 400: too long"),
        (reply(b"<h1>Bad gateway</h1>", 502), "HTTP 502: <h1>Bad gateway</h1>"),
        (reply(b"", 503), "HTTP 503: no message"),
        (reply(b'["error"]', 500), 'HTTP 500: \\["error"\\]'),
        ([b"SSH-2.0-OpenSSH\r\n\r\n", DROP], "not HTTP/1.1"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", DROP], "not HTTP/1.1"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", DROP], "closed the connection before"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", DROP], "closed the connection before"),
        ([DROP], "closed the connection before"),
    ],
)
def test_what_is_no_whole_answer_says_why(answer, message):
    with StubServer(lambda _: answer) as server, pytest.raises(RequestFailedError, match=message):
        ask(server.url)


def test_nobody_who_listens_is_a_failure():
    with pytest.raises(RequestFailedError, match="the connection failed"):
        ask("http://127.0.0.1:9")


STREAM = b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\n\nid: 3\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_from_pieces_of_any_size(size):
    lines, found = EventLines(), []
    for begin in range(0, len(STREAM), size):
        found += lines.feed(STREAM[begin : begin + size])
    assert found == [b'{"a": 1}', b"two", b"[DONE]"]
