"""Who may ask a server, from where, with what bodies, and what a log makes of what clients send."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from redrafter.cli import main
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.serve import log
from redrafter.serve.answers.formats import error_of_cut
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.network import guards
from redrafter.serve.network.api_keys import KEY_VARIABLE, ApiKeys, collect_keys
from redrafter.serve.network.guards import AccessPolicy, check_structure
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.routes.app import create_app
from redrafter.serve.server import Server

JSON = {"content-type": "application/json"}
COMPLETIONS = "/v1/completions"
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


class Service:
    """Answers with who asked."""

    model, created, context = "stub", 0, 100
    engine = SimpleNamespace(alive=True, healthy=True, load=SimpleNamespace(running=0, asleep=False))
    metrics = SimpleNamespace(text=lambda: "numbers 1\n")
    error: Exception | None = None

    @property
    def model_entries(self) -> list[dict[str, Any]]:
        entry = {"id": "stub", "object": "model", "created": 0, "owned_by": "redrafter", "max_model_len": 100}
        return [entry | {"parent": None}]

    async def completion(self, body: Any, facts: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"client": facts["client"], "prompt": body.prompt}


def asked(app: Any, method: str, path: str, base: str = "http://127.0.0.1:8000", **how: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            return await client.request(method, path, **how)

    return asyncio.run(ask())


def posted(app: Any, headers: dict[str, str] | None = None, **how: Any) -> httpx.Response:
    return asked(
        app, "POST", COMPLETIONS, content=b'{"prompt": "a"}', headers=JSON if headers is None else headers, **how
    )


# Keys


@pytest.fixture
def locked() -> Any:
    return create_app(Service(), AccessPolicy(ApiKeys(["first", "second", "first"])))


def test_a_key_is_one_after_the_word_bearer(locked):
    for key in ("Bearer wrong", "Bearer", "Basic second", "second"):
        assert asked(locked, "GET", "/v1/models", headers={"Authorization": key}).status_code == 401
    assert asked(locked, "GET", "/v1/models", headers={"Authorization": "bEARER  second"}).status_code == 200


def test_a_key_may_come_as_anthropics_clients_send_it(locked):
    for headers, status, client in (
        ({"X-Api-Key": "second"}, 200, "key-2"),
        ({"X-Api-Key": " second "}, 200, "key-2"),
        ({"X-Api-Key": "second", "Authorization": "Bearer wrong"}, 200, "key-2"),
        ({"X-Api-Key": "wrong", "Authorization": "Bearer first"}, 200, "key-1"),
        ({"X-Api-Key": "Bearer second"}, 401, None),
        ({"X-Api-Key": ""}, 401, None),
    ):
        answer = posted(locked, JSON | headers)
        assert (answer.status_code, answer.json().get("client")) == (status, client)


@pytest.mark.parametrize("path", MESSAGES)
def test_who_may_not_ask_is_told_in_the_shape_of_the_protocol(locked, path):
    known = create_app(Service(), AccessPolicy(hosts=("localhost",)), max_body_bytes=10)
    for app, base, how, status, kind in (
        (locked, "http://127.0.0.1:8000", {}, 401, "authentication_error"),
        (known, "http://evil.example", {}, 403, "permission_error"),
        (known, "http://localhost", {"headers": {"origin": "http://evil.example"}}, 403, "permission_error"),
        (known, "http://localhost", {}, 413, "request_too_large"),
    ):
        answer = asked(app, "POST", path, base, json={"model": "a" * 20}, **how)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind


def test_a_client_is_named_by_its_key_or_else_its_address(locked):
    assert posted(locked, JSON | {"Authorization": "Bearer second"}).json()["client"] == "key-2"
    assert "text/html" in asked(locked, "GET", "/docs").headers["content-type"]  # which asks for the key
    unlocked = create_app(Service())
    assert posted(unlocked, JSON | {"Authorization": "Bearer anything"}).json()["client"] == "127.0.0.1"
    assert asked(unlocked, "GET", "/metrics").status_code == 200
    metered = create_app(Service(), AccessPolicy(ApiKeys(["first"]), open_metrics=True))
    assert asked(metered, "GET", "/metrics").text == "numbers 1\n"
    assert asked(metered, "GET", "/v1/models").status_code == 401


def test_every_key_is_compared(monkeypatch):
    """Else the time of an answer would tell which key a guess comes close to."""
    from redrafter.serve.network import api_keys

    compared: list[bytes] = []
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda one, other: compared.append(one) or one == other)
    assert ApiKeys(["a", "bb", "ccc"]).client(b"Bearer a") == "key-1"
    assert len(compared) == 3
    assert {len(digest) for digest in compared} == {32}


def test_keys_come_from_everywhere(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("# of the lab\nthird \n\nfourth\n")
    monkeypatch.setenv(KEY_VARIABLE, "second")
    keys = collect_keys(("first",), str(tmp_path / "keys"))
    names = ("first", "second", "third", "fourth")
    assert [keys.client(f"Bearer {name}".encode()) for name in names] == [f"key-{number}" for number in range(1, 5)]


def test_keys_that_cannot_be_read_or_sent_are_refused_and_not_shown(tmp_path):
    (tmp_path / "keys").write_text("# none\n")
    for given, file, says in (
        ((), "keys", "holds no key"),
        ((), "none", "cannot be read"),
        (("geheim\u00e4",), None, "printable ASCII"),
    ):
        with pytest.raises(ArgumentError, match=says) as refusal:
            collect_keys(given, file and str(tmp_path / file))
        assert "geheim" not in str(refusal.value)


def test_keys_are_shown_nowhere(capsys, tmp_path):
    words = ["--api-key", "geheim1", "--api-key", "geheim2"]
    assert main(["serve", "--print-config", *words]) == 0
    out, err = capsys.readouterr()
    assert "geheim" not in out + err
    assert "api_key" not in json.loads(out)
    (tmp_path / "c.json").write_text('{"api_key": ["geheim3"], "allowed_hosts": ["a", "b"]}')
    assert main(["serve", "--print-config", "--config", str(tmp_path / "c.json")]) == 0
    out, _ = capsys.readouterr()
    assert "geheim" not in out
    assert json.loads(out)["allowed_hosts"] == ["a", "b"]
    server = Server.__new__(Server)
    server.options, server.keys, server.model = ServeOptions(api_key=("geheim",)), ApiKeys(["geheim"]), "m"
    server.engine = SimpleNamespace(facts=SimpleNamespace(description=["what is served"]))
    server.tokenizer = SimpleNamespace(chat_template=None)
    said = "\n".join(server.summary("http://127.0.0.1:8000"))
    assert "curl http://127.0.0.1:8000/v1/completions" in said
    server.tokenizer = SimpleNamespace(chat_template="a template")
    chat = server.summary("http://127.0.0.1:8000")[-1]
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in chat
    assert json.loads(chat.split("-d ")[1].strip("'"))["messages"] == [{"role": "user", "content": "Tell me a story."}]
    assert "Bearer $REDRAFTER_API_KEY" in said
    assert "geheim" not in said


# Hosts and origins


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "status"),
    [
        ("127.0.0.1", (), "127.0.0.1:1234", 200),
        ("127.0.0.1", (), "localhost", 200),
        ("127.0.0.1", (), "[::1]:80", 200),
        ("127.0.0.1", (), "[::1]", 200),
        ("127.0.0.1", (), "::1", 200),
        ("127.0.0.1", (), "", 403),
        ("127.0.0.1", (), "evil.example:8000", 403),
        ("127.0.0.1", (), "127.0.0.1.evil.example", 403),
        ("::1", (), "evil.example", 403),
        ("127.0.0.1", ("*",), "evil.example", 200),
        ("127.0.0.1", ("mine.example",), "mine.example:80", 200),
        ("127.0.0.1", ("mine.example",), "localhost", 403),
        ("0.0.0.0", (), "anything.example", 200),
        ("0.0.0.0", ("Mine.example", "*.other.example"), "MINE.example", 200),
        ("0.0.0.0", ("mine.example", "*.other.example"), "a.other.example", 200),
        ("0.0.0.0", ("mine.example", "*.other.example"), "aother.example", 403),
    ],
)
def test_a_name_that_leads_here_is_not_enough(bound, allowed, host, status):
    app = create_app(Service(), AccessPolicy.from_options(ApiKeys(), ServeOptions(host=bound, allowed_hosts=allowed)))
    assert asked(app, "GET", "/v1/models", headers={"Host": host}).status_code == status
    assert asked(app, "GET", "/health", headers={"Host": host}).status_code == 200


HERE = "http://127.0.0.1:8000"
LOCAL = (b"host", b"localhost")


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, [LOCAL]),
        (200, [(b"host", b"[::1]:80")]),
        (400, [(b"host", b"[::1")]),
        (400, [(b"host", b"[::1]x")]),
        (400, [(b"host", b"[localhost].evil.example")]),
        (400, [(b"host", b"localhost:80:90")]),
        (400, [(b"host", b"localhost:evil.example")]),
        (400, [LOCAL, LOCAL]),
        (200, [LOCAL, (b"transfer-encoding", b"Chunked")]),
        (400, [LOCAL, (b"transfer-encoding", b"gzip, chunked")]),
        (400, [LOCAL, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")]),
        (400, [LOCAL, (b"transfer-encoding", b"chunked"), (b"content-length", b"2")]),
        (200, [LOCAL, (b"upgrade", b"h2c")]),
        (400, [LOCAL, (b"upgrade", b"h2c"), (b"content-length", b"2")]),
        (200, [LOCAL, *[(b"x", b"a")] * 99]),
        (431, [LOCAL, *[(b"x", b"a")] * 100]),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_or_has_too_many_headers_is_refused(status, headers):
    app = create_app(Service(), AccessPolicy.from_options(ApiKeys(), ServeOptions()))
    for path in ("/health", "/v1/models"):
        answered: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            answered.append(message)  # noqa: B023

        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
        asyncio.run(app(scope | {"headers": headers}, receive, send))
        assert answered[0]["status"] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": HERE}, 200),
        ({"origin": HERE, "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://elsewhere.example"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"origin": "http://127.0.0.1:9000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[broken"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://chat.example"}, 200),
    ],
)
def test_pages_of_other_servers_may_not_ask(headers, status):
    app = create_app(Service(), AccessPolicy(origins=("https://chat.example",)))
    assert posted(app, JSON | headers).status_code == status


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_an_allowed_origin_is_told_so_before_it_asks_and_when_it_does():
    mine, allowed = {"Origin": "https://chat.example"}, "access-control-allow-origin"
    app, closed = create_app(Service(), AccessPolicy(ApiKeys(["k"]), origins=(mine["Origin"],))), create_app(Service())
    for origin, status in (mine["Origin"], 200), ("https://evil.example", 400):
        answer = asked(app, "OPTIONS", COMPLETIONS, headers={"Origin": origin} | PREFLIGHT)
        assert answer.status_code == status
        assert (answer.headers.get(allowed) == origin) is (status == 200)
    assert posted(app, JSON | mine | {"Authorization": "Bearer k"}).headers[allowed] == mine["Origin"]
    assert allowed not in posted(closed, JSON | {"Origin": HERE}).headers
    assert asked(closed, "OPTIONS", COMPLETIONS, headers=mine | PREFLIGHT).status_code == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "origin": HERE}, 415),
        ({"origin": HERE}, 415),
        ({"content-type": "text/plain", "sec-fetch-site": "same-origin"}, 415),
    ],
)
def test_bodies_are_called_json_where_a_browser_sends_them(headers, status):
    answer = posted(create_app(Service()), headers)
    assert answer.status_code == status
    if status == 415:
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


# Routes


def test_head_is_answered_wherever_get_is_and_refused_where_bodies_are_posted():
    app = create_app(Service())
    for path in ("/", "/health", "/docs", "/openapi.json", "/metrics", "/v1/models", "/v1/health/model"):
        assert asked(app, "HEAD", path).status_code == 200
    assert asked(app, "HEAD", COMPLETIONS).status_code == 405


def test_what_is_not_there_is_said_to_the_operator(monkeypatch, caplog):
    service = Service()
    service.error = UnsupportedError("llguidance is missing: pip install it")
    monkeypatch.setattr(logging.getLogger("redrafter"), "propagate", True)
    answer = posted(create_app(service))
    assert answer.status_code == 501
    assert "pip" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert "llguidance is missing: pip install it" in caplog.text


@pytest.mark.parametrize(
    ("error", "status_kind"), [(ReDrafterError("slow"), "server_error"), (Stopped(), "unavailable_error")]
)
def test_a_stream_that_is_cut_off_says_so(error, status_kind):
    class Cut(Service):
        async def completion(self, body: Any, facts: dict[str, Any]) -> Any:
            async def parts() -> AsyncIterator[dict[str, Any]]:
                yield {"n": 1}
                raise error_of_cut(error)

            return parts()

    first, last = posted(create_app(Cut())).text.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == {"n": 1}
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == status_kind


# Bodies


def test_an_integer_of_too_many_digits_is_refused():
    body = b'{"prompt": "a", "seed": ' + b"1" * 4301 + b"}"
    answer = asked(create_app(Service()), "POST", COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400
    assert "number out of range" in answer.json()["error"]["message"]


LONGEST = 1280  # bytes: 160 commas, 40 brackets and colons, 10 exponents


def test_a_body_of_as_many_parts_as_may_be_is_parsed_and_none_of_more():
    check_structure(b"," * 160 + b"[{:" * 13 + b"1e5 2E-7 " * 5, LONGEST)
    for body in b"," * 161, b"[" * 20 + b"{" * 21, b":" * 41, b"1e5 2E-7 " * 6:
        with pytest.raises(ApiError) as refusal:
            check_structure(body, LONGEST)
        assert refusal.value.status == 413


async def test_large_bodies_are_held_and_parsed_within_limits(monkeypatch):
    monkeypatch.setattr(guards, "SMALL_BODY_BYTES", 1000)
    monkeypatch.setattr(guards, "MAX_LARGE_BODIES_BYTES", 3000)
    app = create_app(Service(), max_body_bytes=5000)
    read = guards.from_json

    def parse(body: bytes, **how: Any) -> Any:
        time.sleep(0.02)
        return read(body, **how)

    monkeypatch.setattr(guards, "from_json", parse)

    async def ask(size: int, count: int, refused: int = 0) -> list[int]:
        """Return statuses in the order of the answers; bodies end once so many have been refused."""
        body, ending, statuses = json.dumps({"prompt": "a" * size}).encode(), asyncio.Event(), list[int]()

        async def held() -> AsyncIterator[bytes]:
            yield body
            await ending.wait()

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE) as client:
            posts = [client.post(COMPLETIONS, content=held() if refused else body, headers=JSON) for _ in range(count)]
            for answer in asyncio.as_completed(posts):
                statuses.append((await answer).status_code)
                if len(statuses) == refused:
                    ending.set()
        return statuses

    assert await ask(6000, 1) == [413]
    assert await ask(2000, 3, refused=2) == [503, 503, 200]
    assert await ask(900, 5) == [200] * 5
    assert await ask(2000, 1) == [200]  # what was held is held no longer


async def test_large_bodies_leave_as_much_time_to_others_as_each_took(monkeypatch):
    monkeypatch.setattr(guards, "SMALL_BODY_BYTES", 10)
    limits, begun = guards.BodyLimits(lambda *_: None, 1 << 20), list[float]()

    def parse(body: bytes, **how: Any) -> None:
        begun.append(time.monotonic())
        time.sleep(0.05)

    monkeypatch.setattr(guards, "from_json", parse)
    await asyncio.gather(*(limits.parse(b"x" * 100) for _ in range(4)))
    assert all(following - previous > 0.095 for previous, following in pairwise(begun))


# Logs


def record(message: str, level: int = logging.INFO, **more: Any) -> logging.LogRecord:
    log_record = logging.LogRecord("redrafter", level, "", 0, message, (), None)
    vars(log_record).update(more)
    return log_record


def test_nothing_that_a_client_sends_makes_a_line_of_its_own():
    nasty = "a\nredrafter: \x1b[31mforged\r\u2028\u202e\ud800\x00 é"
    line = log.TextLines().format(record(nasty, logging.WARNING))
    assert line == "redrafter: warning: a\\nredrafter: \\x1b[31mforged\\r\\u2028\\u202e\\ud800\\x00 é"
    line = log.JsonLines().format(record(nasty, facts={"id": nasty}))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["id"] == nasty
    try:
        raise ValueError("one\nredrafter: forged")
    except ValueError as error:
        trace = (ValueError, error, error.__traceback__)
    lines = log.TextLines().format(record("it broke", logging.ERROR, exc_info=trace)).splitlines()
    assert lines[0] == "redrafter: error: it broke"
    assert all(line.startswith("  ") for line in lines[1:])
    assert "ValueError: one" in json.loads(log.JsonLines().format(record("x", exc_info=trace)))["exception"]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [(b"mine", "mine"), (b"a\x1b[31mb\xe9\nc", "a[31mbc"), (b"x" * 500, "x" * 100), (b"a status=200", "a status=200")],
)
def test_a_request_id_is_plain(sent, kept, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("redrafter"), "propagate", True)
    with caplog.at_level(logging.INFO, "redrafter"):
        answer = posted(create_app(Service()), JSON | {"x-request-id": sent})
    assert answer.headers["x-request-id"] == kept
    shown = kept if " " not in kept and "[" not in kept else json.dumps(kept)
    assert f" id={shown} client=127.0.0.1" in caplog.text


SAID = """
import asyncio, logging, threading, warnings
from redrafter.serve.log import start_logging
start_logging("json", "info")
logging.getLogger("redrafter.serve").debug("not this")
logging.getLogger("uvicorn.error").warning("of uvicorn\\n")
warnings.warn("a warning")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(), thread.join()
async def fail():
    asyncio.get_running_loop().call_exception_handler({"message": "of asyncio"})
asyncio.run(fail())
raise SystemError("the end")
"""


def test_every_line_is_json_whoever_says_it():
    run = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    expected = ["of uvicorn", "a warning", "a thread ended: ZeroDivisionError", "of asyncio", "SystemError"]
    assert [line["message"] for line in lines] == expected
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert "the end" in lines[4]["exception"]
    assert {line["level"] for line in lines} == {"warning", "error", "critical"}
