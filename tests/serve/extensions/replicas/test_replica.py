"""Answers of a replica that is called as Ray's proxy calls it."""

import importlib
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import psutil
import pytest

pytest.importorskip("fastapi")
prometheus = pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from helpers.fake_ray import REPLICA, FakeRay
from helpers.processes import soon
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import LoadEngine
from redrafter.serve.network.api_keys import ApiKeys


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    return FakeRay().install(monkeypatch)


@pytest.fixture
def module(ray, monkeypatch) -> Iterator[ModuleType]:
    module = importlib.import_module(REPLICA)
    monkeypatch.setattr(module, "start_logging", lambda form, level: None)
    yield module
    monkeypatch.delitem(importlib.sys.modules, REPLICA)  # type: ignore[attr-defined]


def registry(count: int) -> object:
    registry = prometheus.CollectorRegistry()
    prometheus.Counter("vllm:tokens", "Tokens", ["model_name"], registry=registry).labels("m").inc(count)
    prometheus.Histogram("seconds", "Seconds", registry=registry, buckets=(1, 2)).observe(1.5)
    return registry


def test_every_series_names_its_replica(module):
    replicas = []
    for name, count in (("a", 3), ("b", 4)):
        replica = object.__new__(module.Replica)
        server = SimpleNamespace(metrics=SimpleNamespace(registry=registry(count)), close=lambda: None)
        replica._name, replica._server = name, server
        replicas.append(replica.metrics())
    lines = module.merge_metrics(replicas).decode().splitlines()
    assert 'vllm:tokens_total{model_name="m",replica="a"} 3.0' in lines
    assert 'vllm:tokens_total{model_name="m",replica="b"} 4.0' in lines
    assert 'seconds_bucket{le="2.0",replica="b"} 1.0' in lines
    assert lines.count("# TYPE vllm:tokens_total counter") == 1


@pytest.mark.slow
def test_a_replica_answers_until_its_engine_ends_and_names_itself(module, ray, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(module, "LAST_EVENT_SECONDS", 0.01)
    before = set(psutil.Process().children())
    load = LoadEngine(ServeOptions(host="127.0.0.1"), LoadOptions(), DraftOptions())
    replica = module.Replica(load, ApiKeys(["secret"]))
    http = TestClient(
        replica.__serve_build_asgi_app__(), base_url="http://127.0.0.1", headers={"Authorization": "Bearer secret"}
    )
    answer = http.get("/v1/models", headers={"X-Request-Id": "a1"})
    assert answer.headers["x-replica"] == "r1"
    assert "x-request-id" not in answer.headers  # Ray's proxy adds it
    assert http.get("/v1/models", headers={"Host": "evil.example.org"}).status_code == 403
    ray.metrics = [replica.metrics(), RuntimeError("lost")]
    assert 'num_requests_running{model_name="boxed",replica="r1"} 0.0' in http.get("/metrics").text
    for path in ("/metrics", "/v1/models"):
        assert http.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
    replica.check_health()

    [engine] = set(psutil.Process().children()) - before
    threading.Timer(1.0, engine.kill).start()
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    text = http.post("/v1/completions", json=body).text
    assert "replica r1 is lost, send the request again" in text
    assert "[DONE]" not in text
    assert soon(lambda: codes == [2])
    with pytest.raises(RuntimeError, match="r1"):
        replica.check_health()
