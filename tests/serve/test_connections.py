"""A server holds so many connections and no more, and answers one request at a time on each."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from helpers.processes import soon
from redrafter.errors import ArgumentError
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions
from redrafter.serve.network import server_process
from redrafter.serve.network.server_process import http_config, room_for_connections


@contextmanager
def served(app: Any, most: int = 100) -> Iterator[tuple[set[Any], int]]:
    """The open connections and the port of an application that serves in a thread."""
    options = ServeOptions(port=0)
    listener, config = listen(options), http_config(app, most, options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.server_state.connections, listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=300)


async def simple(scope: Any, receive: Any, send: Any) -> None:
    """Answers "ok", to `/slow` once its client has left."""
    if scope["type"] != "http":
        return
    while scope["path"] == "/slow" and (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def endless(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 10000, "more_body": True})
        await asyncio.sleep(0)


def connect_and_send(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=300)
    connection.sendall(sent)
    return connection


REQUEST = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"


def read_until_closed(connection: socket.socket) -> None:
    """Read until the other side has closed; raises `TimeoutError` if it never does."""
    with suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


def test_who_keeps_the_server_waiting_is_dropped(monkeypatch):
    monkeypatch.setattr(server_process, "REQUEST_SECONDS", 0.5)
    with served(simple) as (opened, port):
        silent, slow = connect_and_send(port, b""), connect_and_send(port, b"GET / HTTP/1.1\r\nX-a: ")
        body = connect_and_send(port, b"POST /slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        idle, again, busy = (connect_and_send(port, REQUEST % path) for path in (b"", b"", b"slow"))
        assert read_answer(again).endswith(b"ok")
        again.sendall(REQUEST[:9])  # a second request that does not come to its end
        for each in (silent, slow, body, again):
            read_until_closed(each)
        assert read_answer(idle).endswith(b"ok")
        read_until_closed(idle)
        assert len(opened) == 1
        busy.settimeout(0.6)
        with pytest.raises(TimeoutError):
            busy.recv(10)  # a client may wait for its answer for as long as it takes
        busy.close()
        assert soon(lambda: not opened)


async def echoing(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body of the request."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def read_answer(connection: socket.socket) -> bytes:
    """Read an answer whose body is empty or "ok"."""
    heard = b""
    connection.settimeout(10)
    while not heard.endswith((b"ok", b"length: 0\r\n\r\n")):
        heard += connection.recv(1)
    return heard


@pytest.mark.parametrize(
    "before",
    (
        b"GET /" + b"x" * 20,
        b"GET / HTTP/1.1\r\nX-a: ",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-a: ",
    ),
    ids=("request line", "headers", "trailers"),
)
def test_heads_without_an_end_are_refused(before):
    """Else one connection takes as much memory as its client can send."""
    with served(echoing) as (_, port):
        connection, heard = connect_and_send(port, before), b""
        connection.settimeout(10)
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"x" * 1000)
                time.sleep(0.001)
        with suppress(ConnectionError):
            while part := connection.recv(1000):
                heard += part
        assert b" 431 " in heard or b" 400 " in heard or not heard  # what is still on its way may undo the answer
        connection.close()


def test_a_head_is_as_long_as_it_may_be_however_it_arrives():
    start, end = b"POST / HTTP/1.1\r\nHost: a\r\nX-a: ", b"\r\nContent-Length: 2\r\n\r\n"
    with served(echoing) as (_, port):
        for pieces in (1, 4):
            connection = connect_and_send(port, b"")
            for length in (server_process.MAX_HEAD_BYTES,) * 3 + (server_process.MAX_HEAD_BYTES + 1,):
                head = start + b"x" * (length - len(start + end)) + end
                size = -(-len(head) // pieces)
                for begin in range(0, len(head), size):
                    connection.sendall(head[begin : begin + size])
                    time.sleep(0.01)
                if length == server_process.MAX_HEAD_BYTES:  # kept alive: each head counts for itself
                    connection.sendall(b"ok")
                    assert read_answer(connection).endswith(b"\r\n\r\nok")
            assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")


async def counting(scope: Any, receive: Any, send: Any) -> None:
    """Streams ten parts to `/stream`, waits at `/slow` until the client leaves, and notes what it has done."""
    if scope["type"] == "http":
        DONE.append(scope["path"])
        if scope["path"] == "/slow":
            while (await receive())["type"] != "http.disconnect":
                pass
            DONE.append("left")
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(10):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"end"})


DONE: list[str] = []
FOLLOWING = (
    REQUEST % b"second",
    REQUEST % b"second" * 3000,
    b"GET /se",
    b"\0\0\r\n\r\n",
    REQUEST % b"second" + b"BAD\r\n\r\n",
    REQUEST % b"second" + b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000,
)


@pytest.mark.parametrize("at_once", (True, False), ids=("at once", "later"))
def test_a_client_that_leaves_is_noticed_whatever_follows_its_request(at_once, caplog):
    with served(counting) as (opened, port):
        for following in (b"", *FOLLOWING):
            DONE.clear()
            connection = connect_and_send(port, REQUEST % b"slow" + (following if at_once else b""))
            assert soon(lambda: DONE)
            connection.sendall(b"" if at_once else following)
            time.sleep(0.02)
            assert DONE == ["/slow"]
            connection.close()
            assert soon(lambda: DONE == ["/slow", "left"] and not opened), following[:80]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("at_once", (True, False), ids=("at once", "later"))
def test_what_follows_a_request_ends_the_connection_after_its_whole_answer(at_once):
    """In particular no error appears within the chunks of a stream."""
    with served(counting) as (_, port):
        for following in FOLLOWING:
            DONE.clear()
            connection = connect_and_send(port, REQUEST % b"stream" + (following if at_once else b""))
            heard = connection.recv(1)
            connection.sendall(b"" if at_once else following)
            while part := connection.recv(1000):
                heard += part
            head, _, body = heard.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert (b"connection: close" in head.lower()) is at_once
            assert b"".join(body.split(b"\r\n")[1::2]) == b"0123456789end"
            assert body.endswith(b"\r\n0\r\n\r\n")
            assert DONE == ["/stream"]


def test_an_empty_line_after_a_request_ends_nothing():
    """Old clients send one after a body."""
    with served(counting) as (_, port):
        connection = connect_and_send(port, b"")
        for _ in range(2):
            connection.sendall(REQUEST % b"stream")
            heard = connection.recv(1)
            connection.sendall(b"\r\n")
            while not heard.endswith(b"\r\n0\r\n\r\n"):
                heard += connection.recv(1000)
            assert b"connection: close" not in heard


def test_a_body_that_is_refused_before_it_has_come_is_read_to_its_end():
    """Else the client may not see the answer, and what is left of the body would be read as a request."""

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    with served(refusing) as (_, port):
        connection = connect_and_send(port, b"")
        for _ in range(3):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n")
            assert read_answer(connection).startswith(b"HTTP/1.1 413 ")
            connection.sendall((REQUEST % b"" * 20_000)[:500_000])
        connection.close()


def test_a_connection_ends_with_an_answer_instead_of_100_continue():
    """The client sends no body then, so that its next request would be read as one."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 500\r\n\r\n"
    with served(simple) as (_, port), connect_and_send(port, head) as connection:
        connection.settimeout(10)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
        assert connection.recv(1000) == b""


def test_headers_after_a_body_are_dropped():
    """Those of the request have been checked by then."""
    seen: list[Any] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "http" and (await receive()).get("more_body"):
            pass
        seen.extend(name for name, _ in scope.get("headers", ()))
        await simple(scope, receive, send)

    with served(noting) as (_, port):
        connection = connect_and_send(
            port, b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
        )
        time.sleep(0.05)
        connection.sendall(b"0\r\nAuthorization: Bearer a\r\n\r\n")
        assert read_answer(connection).endswith(b"ok")
    assert seen == [b"host", b"transfer-encoding"]


def test_an_offer_of_another_protocol_is_not_taken():
    offer = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with served(simple) as (_, port):
        connection = connect_and_send(port, b"")
        for _ in range(3):
            connection.sendall(offer)
            assert read_answer(connection).endswith(b"ok")
        connection.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_one_connection_too_many_is_told_so():
    with served(simple, most=3) as (opened, port):
        busy = [connect_and_send(port, REQUEST % b"slow") for _ in range(3)]
        assert soon(lambda: len(opened) == 3)
        answer = httpx.get(f"http://127.0.0.1:{port}/", timeout=300)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == "too many connections"
        busy[0].close()
        assert soon(lambda: len(opened) == 2)
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=300).text == "ok"


def test_there_are_no_more_connections_than_files(monkeypatch):
    monkeypatch.setattr(server_process, "open_file_limit", lambda: 500)
    assert 300 < room_for_connections(None) < 500
    assert room_for_connections(200) == 200
    with pytest.raises(ArgumentError, match="--max-connections 600 needs more files"):
        room_for_connections(600)
    monkeypatch.setattr(server_process, "open_file_limit", lambda: 100_000)
    assert room_for_connections(None) == server_process.MAX_CONNECTIONS


def test_open_files_are_raised_to_what_the_system_allows():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert server_process.open_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
