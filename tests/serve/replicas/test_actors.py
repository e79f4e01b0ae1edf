"""What runs in Ray's actors, called as Ray calls it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import psutil
import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from helpers.fake_ray import FakeHandle, FakeRay, FakeUnavailableError
from helpers.processes import soon
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ReDrafterError
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.application import EngineReplica, RouterReplica
from redrafter.serve.replicas.exchange import AnswerPart, AnswerStart, HttpCall, ReplicaLostError

JSON = [(b"content-type", b"application/json")]


@pytest.fixture(autouse=True)
def ray(monkeypatch) -> None:
    FakeRay().install(monkeypatch)
    monkeypatch.setattr("redrafter.serve.replicas.application.start_logging", lambda form, level: None)


def router_of(handle: FakeHandle) -> TestClient:
    return TestClient(RouterReplica(handle, ServeOptions(host="0.0.0.0"), ApiKeys()).__serve_build_asgi_app__())


def test_a_router_asks_replicas_by_rays_handle():
    handle = FakeHandle([AnswerPart(AnswerStart(200, JSON), b"[1]")], [])
    assert router_of(handle).get("/v1/models").json() == [1]
    assert handle.cancelled == 1


def test_a_router_leaves_out_the_metrics_of_a_replica_that_does_not_answer():
    told = [("a", b"# TYPE busy gauge\nbusy 3.0\n"), RuntimeError("lost")]
    assert 'busy{replica="a"} 3.0' in router_of(FakeHandle([], told)).get("/metrics").text


def test_no_replicas_have_no_metrics():
    answer = router_of(FakeHandle([], FakeUnavailableError())).get("/metrics")
    assert (answer.status_code, answer.text) == (200, "")


def test_metrics_that_do_not_come_in_time_are_no_metrics():
    answer = router_of(FakeHandle([], TimeoutError())).get("/metrics")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")


def made(load: LoadOptions) -> EngineReplica:
    return EngineReplica(ServeOptions(), load, DraftOptions(), ApiKeys())


def call(method: str, path: str, body: bytes = b"") -> HttpCall:
    headers = [*JSON, (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return HttpCall(scope | {"headers": headers, "client": ("1.2.3.4", 5), "http_version": "1.1"}, body)


def test_a_replica_that_cannot_load_leaves_no_process(tmp_path):
    before = psutil.Process().children()
    with pytest.raises(ReDrafterError):
        made(LoadOptions(model=str(tmp_path)))
    assert psutil.Process().children() == before


async def whole(parts: AsyncIterator[AnswerPart]) -> tuple[AnswerStart, bytes]:
    told = [part async for part in parts]
    assert told[0].start is not None
    return told[0].start, b"".join(part.body for part in told)


@pytest.mark.slow
def test_a_replica_answers_until_its_engine_ends(monkeypatch):
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    replica = made(LoadOptions())
    ask = json.dumps({"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()

    async def answers() -> None:
        start, body = await whole(replica.answer(call("GET", "/v1/models")))
        assert (start.status, json.loads(body)["data"][0]["id"]) == (200, "boxed")
        assert (b"x-replica", b"r1") in start.headers
        assert replica.metrics()[0] == "r1"
        async with aclosing(replica.answer(call("POST", "/v1/completions", ask))) as parts:
            assert (await anext(parts)).start is not None
            for process in psutil.Process().children():
                process.kill()
            with pytest.raises(ReplicaLostError):
                async for _ in parts:
                    pass

    asyncio.run(answers())
    assert soon(lambda: codes == [2])
    with pytest.raises(ReplicaLostError, match="r1"):
        replica.check_health()
