"""Spans of requests, as a collector gets them."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.instrumentation.fastapi")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

from helpers.engine_in_thread import serving
from helpers.processes import soon
from helpers.serving import PROMPTS, Program
from redrafter.app.options import LoadOptions
from redrafter.cli import main
from redrafter.serve.command import listen
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.server_process import http_config
from redrafter.serve.routes.app import server_app

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}


class Collector:
    """A server that keeps what it is sent, as a collector of OpenTelemetry is."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = trace_service.ExportTraceServiceRequest.FromString(body)
                collector.requests.append((self.path, request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        scopes = [
            scope for _, request in self.requests for each in request.resource_spans for scope in each.scope_spans
        ]
        return [span for scope in scopes for span in scope.spans]

    def span_of(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """The span of a request, once it was sent, and its attributes."""

        def found() -> list[Any]:
            return [span for span in self.spans() if attributes(span).get("gen_ai.request.id") == request_id]

        assert soon(found)
        [span] = found()
        return span, attributes(span)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in any_value.array_value.values]
        return getattr(any_value, kind)

    return {each.key: value(each.value) for each in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds between batches
        with serving(
            LoadOptions(device="cpu"), otlp_traces_endpoint=collector.url, max_batch_size=1, max_queue_size=1
        ) as server:
            yield server


def test_a_request_is_a_span_below_that_of_its_client(traced, collector):
    headers = {"x-request-id": "one", "traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    began = time.time_ns()
    body = {"prompt": PROMPTS[0], "n": 2, "temperature": 0.7, "top_p": 0.9, "max_tokens": 20, "seed": 5}
    answer = traced.post("/v1/completions", body | {"ignore_eos": True}, headers=headers).json()
    span, found = collector.span_of("one")
    ended = time.time_ns()
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "a=b")
    assert (span.name, span.kind) == ("POST /v1/completions", 2)  # of a server
    assert began < span.start_time_unix_nano < span.end_time_unix_nano < ended
    asked = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": answer["model"],
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert asked.items() <= found.items()
    usage, drafts = answer["usage"], answer["metrics"]["speculative_decoding"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 40
    assert found["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert drafts["num_draft_tokens"] > 0
    for name, told in (
        ("drafts", "spec_steps"),
        ("draft_tokens", "draft_tokens"),
        ("accepted_tokens", "accepted_draft_tokens"),
    ):
        assert found[f"redrafter.spec_decode.num_{name}"] == drafts[f"num_{told}"]
    seconds = {name.removeprefix("gen_ai.latency."): x for name, x in found.items() if ".latency." in name}
    assert 0 <= seconds["time_in_queue"] < seconds["time_to_first_token"] < seconds["e2e"]
    assert seconds["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert not any(text in f"{span}" for text in (PROMPTS[0], *texts))
    assert not any(name.startswith("error") for name in found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_without_a_parent_begins_a_trace_of_its_own(stream, traced, collector):
    name = f"chat, {stream}"
    traced.post("/v1/chat/completions", CHAT | {"stream": stream}, headers={"x-request-id": name}).raise_for_status()
    span, found = collector.span_of(name)
    assert not span.parent_span_id
    assert span.trace_id.hex() != TRACE
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.output_tokens"] == 6
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    paths = {path for path, _ in collector.requests}
    assert paths == {"/v1/traces"}
    services = {
        each.value.string_value
        for _, request in collector.requests
        for spans in request.resource_spans
        for each in spans.resource.attributes
        if each.key == "service.name"
    }
    assert services == {"redrafter"}


def test_a_parent_that_is_not_sampled_or_no_parent_at_all_is_kept_to(traced, collector):
    for name, parent in (("unsampled", f"00-{TRACE}-{PARENT}-00"), ("garbled", "00-xyz")):
        headers = {"x-request-id": name, "traceparent": parent}
        traced.post("/v1/chat/completions", CHAT, headers=headers).raise_for_status()
    assert not collector.span_of("garbled")[0].parent_span_id
    assert not any(attributes(span)["gen_ai.request.id"] == "unsampled" for span in collector.spans())


def test_requests_are_no_children_of_the_one_before_them_on_a_connection(traced, collector):
    """The loop may read a request in the context of the one before it, which has resumed reading."""
    options = ServeOptions(port=0)
    listener = listen(options)
    http = uvicorn.Server(http_config(server_app(traced.server), 10, options))
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    body = b'{"prompt": "The sea", "max_tokens": 2}'

    def request(name: str, parent: str = "") -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n{parent}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    try:
        with socket.create_connection(listener.getsockname(), timeout=60) as connection:
            connection.sendall(request("kept 1", f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"))
            for name in ("kept 2", "kept 3"):
                assert connection.recv(10000).startswith(b"HTTP/1.1 200 ")
                connection.sendall(request(name))
                collector.span_of(name)
    finally:
        http.should_exit = True
        thread.join(60)
    parents = [collector.span_of(f"kept {number}")[0].parent_span_id.hex() for number in range(1, 4)]
    assert parents == [PARENT, "", ""]


@pytest.mark.parametrize("setting", ["OTEL_BSP_MAX_QUEUE_SIZE=100", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=-1"])
def test_settings_that_the_sdk_refuses_end_the_command_before_it_loads_anything(setting, capsys, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    monkeypatch.setattr("redrafter.serve.command._serve", lambda *_: pytest.fail("it loads"))
    assert main(["serve", "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert setting.split("=")[0] in line


def test_who_waits_leaves_or_is_refused_is_told(traced, collector):
    body = {"prompt": PROMPTS[1], "max_tokens": 400, "ignore_eos": True}
    stream = {"method": "POST", "url": f"{traced.url}/v1/completions", "timeout": 60}
    stream["json"] = body | {"stream": True, "max_tokens": 900}
    statuses: list[int] = []

    def wait() -> None:
        headers = {"x-request-id": "waits"}
        statuses.append(traced.post("/v1/chat/completions", CHAT, headers=headers).status_code)

    waiting = threading.Thread(target=wait)
    with httpx.stream(**stream, headers={"x-request-id": "leaves"}) as answer:
        assert answer.status_code == 200
        waiting.start()
        assert soon(lambda: traced.metrics()["vllm:num_requests_waiting"] == 1)
        refused = traced.post("/v1/completions", body | {"n": 3}, headers={"x-request-id": "refused"})
        assert refused.status_code == 429
    waiting.join()
    assert statuses == [200]
    _, left = collector.span_of("leaves")
    assert left["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < left["gen_ai.usage.output_tokens"] < 900
    span, found = collector.span_of("refused")
    assert (found["error.type"], span.status.code) == ("QueueFullError", 2)
    assert "max_queue_size" in span.status.message
    assert collector.span_of("waits")[1]["gen_ai.latency.time_in_queue"] > 0
    assert traced.metrics()["vllm:request_queue_time_seconds_sum"] > 0


@pytest.mark.variant
def test_what_is_left_is_sent_when_the_server_ends(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    program = Program("--otlp-traces-endpoint", f"{collector.url}/a/path")
    before = len(collector.requests)
    program.post("/v1/chat/completions", CHAT, headers={"x-request-id": "late"}).raise_for_status()
    assert len(collector.requests) == before
    assert program.end() == 0
    collector.span_of("late")
    [(path, request)] = collector.requests[before:]
    assert path == "/a/path"
    [service] = [each for each in request.resource_spans[0].resource.attributes if each.key == "service.name"]
    assert service.value.string_value == "mine"


def test_the_flag_is_refused_where_it_means_nothing(capsys, monkeypatch):
    for endpoint in ("localhost:4317", "grpc://localhost:4317", "http://"):
        assert main(["serve", "--otlp-traces-endpoint", endpoint]) == 2
        assert "must be a URL such as http://localhost:4318" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "redrafter.serve.traces", raising=False)
    assert main(["serve", "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install '.[serve,otel]'" in line


@pytest.mark.variant
def test_nothing_of_it_is_imported_without_the_flag():
    code = (
        "import sys, redrafter.serve.command, redrafter.serve.server, redrafter.serve.engine_process.worker\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
