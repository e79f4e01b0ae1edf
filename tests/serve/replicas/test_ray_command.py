"""`redrafter serve --ray`, from its start to a signal."""

import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("fastapi")

from helpers.fake_ray import FakeRay
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.serve.config import ReplicaOptions, ServeOptions
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.application import serve_replicas

LOADING, RUNNING = ("DEPLOYING", ""), ("RUNNING", "")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def serve(port: int, ready: Callable[[], object] = terminate) -> None:
    replicas = ReplicaOptions(ray=True, ray_address="a.example.org:6379")
    serve_replicas(ServeOptions(port=port), LoadOptions(), DraftOptions(), replicas, ApiKeys(), ready)


def test_it_serves_until_a_signal_and_leaves_nothing_behind(port, monkeypatch):
    ray = FakeRay([LOADING, RUNNING]).install(monkeypatch)
    serve(port)
    assert ray.calls == ["init", "start", "run_many", "delete", "shutdown", "end"]


def test_ray_serve_goes_on_where_others_use_it(port, monkeypatch):
    ray = FakeRay([RUNNING, RUNNING]).install(monkeypatch)
    serve(port)
    assert ray.calls[-2:] == ["delete", "end"]


def test_a_signal_while_models_are_loaded_ends_it(port, monkeypatch):
    def states() -> Iterator[tuple[str, str]]:
        terminate()
        yield LOADING

    ray = FakeRay(states()).install(monkeypatch)
    serve(port, ready=lambda: pytest.fail("it is not ready"))
    assert "delete" in ray.calls


def test_replicas_that_cannot_be_loaded_are_told_in_one_line(port, monkeypatch):
    trace = "Traceback:\n  File x\nredrafter.errors.CheckpointError: no such model\n"
    ray = FakeRay([("DEPLOY_FAILED", trace)]).install(monkeypatch)
    with pytest.raises(ReDrafterError, match=r"cannot be loaded: redrafter\.errors\.CheckpointError: no such model$"):
        serve(port)
    assert ray.calls[-1] == "end"


def test_a_proxy_that_listens_elsewhere_is_told(port, monkeypatch):
    FakeRay([RUNNING]).install(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    with pytest.raises(ReDrafterError, match=f"does not listen on 127.0.0.1:{free}"):
        serve(free)


def test_a_cluster_that_is_not_there_is_told(port, monkeypatch):
    FakeRay(init_error=ConnectionError("refused")).install(monkeypatch)
    with pytest.raises(ArgumentError, match=r"no Ray cluster at a\.example\.org:6379"):
        serve(port)
