"""The application of Ray Serve: what Ray is told of it, and what runs in its actors, called as Ray calls it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import psutil
import pytest

pytest.importorskip("fastapi")
prometheus = pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from helpers.fake_ray import Deployment, FakeHandle, FakeRay, FakeUnavailableError
from helpers.processes import soon
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ReDrafterError
from redrafter.extensions.replicas.application import (
    EngineReplica,
    RouterReplica,
    app,
    build_application,
    merge_metrics,
    pause,
)
from redrafter.extensions.replicas.exchange import AnswerPart, AnswerStart, HttpCall, ReplicaLostError
from redrafter.extensions.replicas.options import ReplicaOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import ApiKeys


def built(load: LoadOptions | None = None, **replicas: object) -> tuple[Deployment, Deployment]:
    """The routers and the engines of an application."""
    options = ServeOptions(api_key=("secret",), max_batch_size=12, drain_timeout=7.0)
    choice = ReplicaOptions(ray=True, **replicas)
    routers = build_application(options, load or LoadOptions(), DraftOptions(), choice, ApiKeys(["secret"]))
    return routers, routers.arguments[0]


@pytest.fixture(autouse=True)
def ray(monkeypatch) -> FakeRay:
    monkeypatch.setattr("redrafter.extensions.replicas.application.start_logging", lambda form, level: None)
    return FakeRay().install(monkeypatch)


def test_a_number_of_replicas_is_kept_or_follows_their_requests():
    _, engines = built(num_replicas=3)
    assert engines.config["num_replicas"] == 3
    assert "autoscaling_config" not in engines.config
    _, engines = built(max_replicas=4, upscale_delay_s=1.0)
    numbers, delays = {"min_replicas": 1, "max_replicas": 4}, {"upscale_delay_s": 1.0, "downscale_delay_s": 600.0}
    assert engines.config["autoscaling_config"] == numbers | delays | {"target_ongoing_requests": 12.0}
    _, engines = built(max_replicas=4, target_ongoing_requests=5.0)  # one is full when more are started
    assert engines.config["request_router_config"]["request_router_kwargs"] == {"target": 5.0}


@pytest.mark.parametrize(
    ("gpus", "load", "options", "expected"),
    [
        (0.0, LoadOptions(), {}, 0.0),
        (8.0, LoadOptions(), {}, 1.0),
        (8.0, LoadOptions(device="cpu"), {}, 0.0),
        (0.0, LoadOptions(), {"num_gpus": 2.0}, 2.0),
    ],
    ids=["none", "some", "on the CPU", "asked for"],
)
def test_a_replica_gets_a_gpu_where_there_are_any(gpus, load, options, expected, ray):
    ray.resources = {"GPU": gpus}
    _, engines = built(load, **options)
    assert engines.config["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": expected}


def test_routers_drain_for_longer_than_replicas_do():
    routers, engines = built()
    assert engines.config["graceful_shutdown_timeout_s"] == 7.0
    assert routers.config["graceful_shutdown_timeout_s"] > 7.0


def test_keys_are_sent_to_other_machines_as_digests_alone():
    routers, engines = built()
    assert "secret" not in repr(routers.arguments) + repr(engines.arguments)
    assert engines.arguments[-1].client(b"Bearer secret") == "key-1"


def test_the_words_of_serve_run_are_read():
    routers = app({"num_replicas": "2", "kv_cache_reuse": "False", "model": "123"})
    options, load, *_ = routers.arguments[0].arguments
    assert (options.kv_cache_reuse, load.model) == (False, "123")
    assert routers.arguments[0].config["num_replicas"] == 2


JSON = [(b"content-type", b"application/json")]


def router_of(handle: FakeHandle) -> TestClient:
    return TestClient(RouterReplica(handle, ServeOptions(host="0.0.0.0"), ApiKeys()).__serve_build_asgi_app__())


@pytest.mark.parametrize(("requests", "seconds"), [(1, 0.0), (2, 0.001), (64, 0.063), (1000, 0.1)])
def test_parts_of_answers_pause_with_the_load_and_no_longer_than_a_reader_notices(requests, seconds):
    assert pause(requests) == pytest.approx(seconds)


def test_a_router_asks_replicas_by_rays_handle():
    handle = FakeHandle([AnswerPart(AnswerStart(200, JSON), b"[1]")], [])
    assert router_of(handle).get("/v1/models").json() == [1]
    assert handle.cancelled == 1


@pytest.mark.parametrize(
    ("told", "status", "says"),
    [
        ([("a", b"# TYPE busy gauge\nbusy 3.0\n"), RuntimeError("lost")], 200, 'busy{replica="a"} 3.0'),
        (FakeUnavailableError(), 200, ""),
        (TimeoutError(), 503, '"unavailable_error"'),
    ],
    ids=["one that does not answer", "no replicas", "not in time"],
)
def test_a_router_tells_the_metrics_of_those_that_answer(told, status, says):
    answer = router_of(FakeHandle([], told)).get("/metrics")
    assert answer.status_code == status
    assert says in answer.text
    assert bool(says) == bool(answer.text)


def made(load: LoadOptions) -> EngineReplica:
    return EngineReplica(ServeOptions(), load, DraftOptions(), ApiKeys())


def call(method: str, path: str, body: bytes = b"") -> HttpCall:
    headers = [*JSON, (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    return HttpCall(scope | {"headers": headers, "client": ("1.2.3.4", 5), "http_version": "1.1"}, body)


@pytest.mark.variant
def test_a_replica_that_cannot_load_leaves_no_process(tmp_path):
    before = psutil.Process().children()
    with pytest.raises(ReDrafterError):
        made(LoadOptions(model=str(tmp_path)))
    assert not set(psutil.Process().children()) - set(before)


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


def metrics(count: int) -> bytes:
    registry = prometheus.CollectorRegistry()
    prometheus.Counter("vllm:tokens", "Tokens", ["model_name"], registry=registry).labels("m").inc(count)
    prometheus.Histogram("seconds", "Seconds", registry=registry, buckets=(1, 2)).observe(1.5)
    return prometheus.generate_latest(registry)


def test_every_series_says_of_which_replica_it_is():
    lines = merge_metrics([("a", metrics(3)), ("b", metrics(4))]).decode().splitlines()
    assert 'vllm:tokens_total{model_name="m",replica="a"} 3.0' in lines
    assert 'vllm:tokens_total{model_name="m",replica="b"} 4.0' in lines
    assert 'seconds_bucket{le="2.0",replica="b"} 1.0' in lines
    assert lines.count("# TYPE vllm:tokens_total counter") == 1
