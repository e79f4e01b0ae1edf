"""The nginx of examples/deploy limits strangers, hides the operators' routes, and passes streams on as they come."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.processes import soon
from helpers.serving import listening
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.server_process import REQUEST_SECONDS

CONFIG = (Path(__file__).parents[2] / "examples" / "deploy" / "nginx.conf").read_text()
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
SEEN: list[dict[str, Any]] = []

pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Notes what arrives; `/stream` sends a part and waits until its client leaves."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    SEEN.append({"path": scope["path"], "client": scope["client"][0], "body": body} | dict(scope["headers"]))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    while scope["path"] == "/stream" and (await receive())["type"] != "http.disconnect":
        pass
    SEEN.append({"path": "ended"})
    await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.fixture(scope="module")
def port(tmp_path_factory: Any) -> Iterator[int]:
    """The port of an nginx in front of the application, with the example's configuration."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("fastcgi", "uwsgi", "scgi", "proxy", "client_body")
    )
    with listening(app) as url:
        text = CONFIG.replace("127.0.0.1:8000", url.removeprefix("http://"), 1)
        text = text.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("http {", f"http {{ {own}", 1)
        text = text.replace("client_header_timeout 10s", "client_header_timeout 1s")
        user = "user root; " if os.geteuid() == 0 else ""  # others may not write to this folder
        (folder / "nginx.conf").write_text(f"daemon off; {user}pid {folder}/pid;\n{text}")
        words = [str(NGINX), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        try:
            assert soon(lambda: answers(port) or process.poll() is not None)
            assert process.poll() is None, process.stderr and process.stderr.read()
            yield port
        finally:
            process.terminate()
            process.wait(30)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(autouse=True)
def clear() -> None:
    time.sleep(0.5)  # the limits of requests recover
    SEEN.clear()


def test_the_example_has_the_limits_of_the_server():
    assert f"client_max_body_size {ServeOptions.max_body_size >> 20}m;" in CONFIG
    [upstream] = re.findall(r"keepalive_timeout (\d+)s;  #", CONFIG)
    assert int(upstream) < REQUEST_SECONDS


def test_operators_routes_are_closed(port):
    paths = (
        "sleep",
        "wake",
        "update_weights",
        "drafter",
        "load_lora_adapter",
        "unload_lora_adapter",
        "/sleep",
        "%73leep",
    )
    for path in ("/metrics", *(f"/v1/{path}" for path in paths), "/v1/x/../sleep"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 403 "), path
    assert SEEN == []


def test_the_address_of_a_client_cannot_be_chosen(port):
    forged = {"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.3", "Host": "evil.example", "Upgrade": "h2c"}
    assert httpx.post(f"http://127.0.0.1:{port}/a", headers=forged | {"Connection": "Upgrade"}, content=b"b").is_success
    [seen, _] = SEEN
    assert (seen["client"], seen[b"x-forwarded-for"], seen[b"host"]) == ("127.0.0.1", b"127.0.0.1", b"localhost")
    assert b"upgrade" not in seen


def test_streams_come_part_by_part_and_leavers_are_noticed(port):
    """Also with a second request on the connection, which nginx keeps until the first answer is whole."""
    for request in (1, 2):
        SEEN.clear()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n" * request)
            heard = b""
            while b"data: 1" not in heard:
                heard += connection.recv(1000)
        assert soon(lambda: [each["path"] for each in SEEN] == ["/stream", "ended"])


def test_bodies_come_whole_and_slow_heads_are_closed(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert (SEEN[0]["body"], SEEN[0][b"content-length"]) == (b"x" * 5000, b"5000")
    assert b"transfer-encoding" not in SEEN[0]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-a: ")
        with suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
    assert httpx.post(f"http://127.0.0.1:{port}/a", content=b"x" * (3 << 20)).status_code == 413


def test_an_address_has_so_many_connections_and_requests(port):
    with ThreadPoolExecutor(40) as pool, httpx.Client() as client:
        statuses = list(pool.map(lambda _: client.get(f"http://127.0.0.1:{port}/a").status_code, range(200)))
    assert 60 <= statuses.count(200) < 200
    assert set(statuses) == {200, 429}
    time.sleep(1)
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(40)]
    heard = []
    for connection in held:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        heard.append(connection.recv(12))
    assert heard.count(b"HTTP/1.1 200") <= 32
    assert set(heard) == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    for connection in held:
        connection.close()
