"""The client of the load generator: addresses, connections that are kept, and answers that are broken."""

import asyncio
import json

import pytest

from helpers.stub_server import DROP, StubServer, reply, stream
from redrafter import ArgumentError
from redrafter.bench.http_client import RequestFailedError, open_session, request, server_url


def ask(url: str, times: int = 1, pause: float = 0.0) -> list[bytes]:
    """Ask in one session, and return the bodies of the answers."""

    async def run() -> list[bytes]:
        bodies = []
        async with open_session(None) as session:
            for _ in range(times):
                async with request(session, "POST", f"{url}/v1/completions", data=b"{}") as response:
                    bodies.append(await response.read())
                if pause:  # a sleep of none would let an end of the connection be seen too
                    await asyncio.sleep(pause)
        return bodies

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://a.example.org/proxy/v1", "https://a.example.org/proxy"),
        ("http://[::1]", "http://[::1]"),
    ],
)
def test_v1_is_left_out_of_a_servers_url(url, expected):
    assert server_url(url) == expected


WRONG = ("", "localhost:8000", "ftp://a", "http://", "http://a:70000", "http://me:secret@a", "http://a/?b=c")


@pytest.mark.parametrize("url", [*WRONG, "http://a b", "http://ä"])
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(ArgumentError, match="--url"):
        server_url(url)


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
