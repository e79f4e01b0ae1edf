"""A server holds so many connections and no more, and drops who keeps it waiting."""

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
uvloop = pytest.importorskip("uvloop")

from helpers.processes import soon
from redrafter.errors import ArgumentError
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions
from redrafter.serve.network import server_process as connections
from redrafter.serve.network.server_process import OpenConnections, http_config, room_for_connections


@contextmanager
def served(app: Any, most: int = 100) -> Iterator[tuple[OpenConnections, int]]:
    """The open connections and the port of an application that serves in a thread."""
    open_connections = OpenConnections(most)
    options = ServeOptions(port=0)
    listener, config = listen(options), http_config(app, open_connections, options)
    server = uvicorn.Server(config)

    async def run() -> None:
        watching = asyncio.ensure_future(open_connections.watch())
        await server.serve([listener])
        watching.cancel()

    thread = threading.Thread(target=uvloop.run, args=(run(),))  # the loop of the server
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield open_connections, listener.getsockname()[1]
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
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.5)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 3000.0)
    with served(simple) as (open_connections, port):
        silent, slow = connect_and_send(port, b""), connect_and_send(port, b"GET / HTTP/1.1\r\nX-a: ")
        read_until_closed(silent)
        read_until_closed(slow)
        idle, again, busy = (
            connect_and_send(port, REQUEST % b""),
            connect_and_send(port, REQUEST % b""),
            connect_and_send(port, REQUEST % b"slow"),
        )
        heard = b""
        while not heard.endswith(b"ok"):
            heard += again.recv(1000)
        again.sendall(REQUEST[:9])  # a second request that does not come to its end
        read_until_closed(again)
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        assert len(open_connections.open) == 2  # that one, and the busy one
        monkeypatch.setattr(connections, "HEADERS_SECONDS", 3000.0)
        monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
        idle.sendall(REQUEST % b"")
        read_until_closed(idle)
        busy.settimeout(0.6)
        with pytest.raises(TimeoutError):
            busy.recv(10)  # a client may wait for its answer for as long as it takes
        assert len(open_connections.open) == 1


def test_who_drips_or_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.5)
    monkeypatch.setattr(connections, "STALLED_SECONDS", 0.5)
    with served(endless) as (open_connections, port):
        slow = connect_and_send(port, b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(2000):
                slow.sendall(b"X-a: b\r\n")
                time.sleep(0.05)
        stalled = connect_and_send(port, REQUEST % b"")
        assert soon(lambda: open_connections.open)
        assert soon(lambda: not open_connections.open)
        stalled.close()


def test_a_body_in_crumbs_is_refused():
    async def reading(scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "http" and (await receive()).get("more_body"):
            pass
        await simple(scope, receive, send)

    def answer(port: int, chunk: int, count: int) -> bytes:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection = connect_and_send(port, head)
        time.sleep(0.1)
        with suppress(OSError):
            connection.sendall((b"%x\r\n" % chunk + b"x" * chunk + b"\r\n") * count + b"0\r\n\r\n")
        with suppress(OSError):
            return connection.recv(1000)
        return b""

    with served(reading) as (_, port):
        assert answer(port, 1, 100_000)[:12] in (b"HTTP/1.1 400", b"")  # what is still on its way may undo the answer
        assert answer(port, 1, 50).startswith(b"HTTP/1.1 200")
        assert answer(port, 100, 1000).startswith(b"HTTP/1.1 200")


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
        REQUEST % b"slow" + b"GET / HTTP/1.1\r\nX-a: ",
    ),
    ids=("request line", "headers", "trailers", "pipelined"),
)
def test_heads_without_an_end_are_refused(monkeypatch, before):
    """Else one connection takes as much memory as its client can send."""
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 3000.0)
    app = simple if b"slow" in before else echoing
    with served(app) as (_, port):
        connection, heard = connect_and_send(port, before), b""
        connection.settimeout(10)
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"x" * 10_000)
                time.sleep(0.01)
        with suppress(ConnectionError):
            while part := connection.recv(1000):
                heard += part
        assert b"431" in heard or not heard  # what is still on its way may undo the answer
        connection.close()


def test_a_pipelined_request_may_take_longer_than_an_idle_connection(monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 0.2)
    with served(simple) as (open_connections, port):
        connection = connect_and_send(port, REQUEST % b"" + REQUEST % b"slow")
        assert read_answer(connection).endswith(b"ok")
        connection.settimeout(0.8)
        with pytest.raises(TimeoutError):  # the second answer comes once the client has left
            connection.recv(1)
        assert len(open_connections.open) == 1
        connection.close()


def test_an_answer_that_has_begun_is_cut_off_without_another_one():
    with served(endless) as (_, port):
        connection = connect_and_send(port, REQUEST % b"")
        connection.recv(1)
        connection.sendall(b"no request\r\n\r\n")
        heard = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                heard += part
        assert heard.count(b"HTTP/1.1") <= 1
        assert b" 400 " not in heard


def test_many_offers_of_other_protocols_in_one_piece_are_declined():
    offer = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with served(echoing) as (_, port):
        connection = connect_and_send(port, offer * 2000)
        for _ in range(2000):
            assert read_answer(connection).endswith(b"length: 0\r\n\r\n")
        connection.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" + offer)
        heard = b""
        with suppress(ConnectionError):
            while part := connection.recv(1000):
                heard += part
        assert (b" 405 " in heard, heard.count(b"HTTP/1.1")) == (True, 1)


def test_a_head_that_fits_is_read_however_it_arrives():
    head = b"POST / HTTP/1.1\r\nHost: a\r\nX-a: " + b"x" * 60_000 + b"\r\nContent-Length: 2\r\n\r\n"
    with served(echoing) as (_, port):
        connection = connect_and_send(port, b"")
        for _ in range(3):  # kept alive: each head counts for itself
            for begin in range(0, len(head), 10_000):
                connection.sendall(head[begin : begin + 10_000])
                time.sleep(0.01)
            connection.sendall(b"ok")
            assert read_answer(connection).endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("length", (b"Content-Length: 2", b"Transfer-Encoding: chunked"))
def test_the_body_of_a_request_that_could_be_http2_is_read(length):
    """Java's client offers HTTP/2 with every request."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    body = b"ok" if b"2" in length else b"2\r\nok\r\n0\r\n\r\n"
    with served(echoing) as (_, port):
        for pause in (0, 0.1):
            connection = connect_and_send(port, head + b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n" + length + b"\r\n\r\n")
            time.sleep(pause)
            connection.sendall(body + REQUEST % b"")
            assert read_answer(connection).endswith(b"\r\n\r\nok")
            assert read_answer(connection).endswith(b"length: 0\r\n\r\n")  # the connection stays open
            connection.close()


def test_waiting_connections_make_room(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_SECONDS", 3000.0)
    with served(simple, most=20) as (open_connections, port):
        slow = [connect_and_send(port, b"GET / HTTP/1.1\r\n") for _ in range(60)]
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{port}/", timeout=300).text == "ok"
        assert len(open_connections.open) <= 20
        read_until_closed(slow[0])


def test_one_connection_too_many_is_told_so():
    with served(simple, most=3) as (open_connections, port):
        busy = [connect_and_send(port, REQUEST % b"slow") for _ in range(3)]
        while len(open_connections.open) < 3 or open_connections.waiting:
            time.sleep(0.01)
        answer = httpx.get(f"http://127.0.0.1:{port}/", timeout=300)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["message"] == "too many connections"
        busy[0].close()
        while len(open_connections.open) > 2:
            time.sleep(0.01)
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=300).text == "ok"


def test_there_are_no_more_connections_than_files(monkeypatch):
    monkeypatch.setattr(connections, "open_file_limit", lambda: 500)
    assert 300 < room_for_connections(None) < 500
    assert room_for_connections(200) == 200
    with pytest.raises(ArgumentError, match="--max-connections 600 needs more files"):
        room_for_connections(600)
    monkeypatch.setattr(connections, "open_file_limit", lambda: 100_000)
    assert room_for_connections(None) == connections.MAX_CONNECTIONS


def test_open_files_are_raised_to_what_the_system_allows():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        assert connections.open_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
