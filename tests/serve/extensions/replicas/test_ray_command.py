"""`redrafter serve --ray`: its options, and its life from its start to a signal."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from redrafter.cli import main
from redrafter.errors import ArgumentError, MissingDependencyError
from redrafter.extensions.replicas.options import ReplicaOptions, check_replicated
from redrafter.serve.config import ServeOptions
from redrafter.serve.replicas.application import app  # as configurations of Ray Serve name it

pytest.importorskip("fastapi")

from helpers.fake_ray import FakeRay
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ReDrafterError
from redrafter.extensions.replicas.application import serve_replicas
from redrafter.serve.network.api_keys import ApiKeys

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


EXAMPLES = Path(__file__).parents[4] / "examples" / "ray"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray": False, "num_replicas": 2}, "--num-replicas is for replicas: add --ray"),
        ({"num_replicas": 0}, "--num-replicas must be from 1"),
        ({"num_gpus": -1.0}, "--num-gpus must be from 0"),
        ({"min_replicas": 1}, "--min-replicas needs --max-replicas"),
        ({"num_replicas": 2, "max_replicas": 4}, "not both"),
        ({"min_replicas": 5, "max_replicas": 4}, "--max-replicas 4 is below --min-replicas 5"),
        ({"target_ongoing_requests": 0.0}, "--target-ongoing-requests must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        ReplicaOptions(**{"ray": True} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"allow_runtime_lora_updating": True}, "--lora-modules"), ({"max_connections": 9}, "--max-connections")],
)
def test_what_replicas_cannot_keep_to_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        check_replicated(ServeOptions(**options))


def test_replicas_do_not_get_the_keys_themselves():
    assert check_replicated(ServeOptions(api_key=("secret",), api_key_file="keys")) == ServeOptions()


def test_the_options_are_flags_of_serve(capsys):
    assert main(["serve", "--ray", "--min-replicas", "1", "--max-replicas", "8", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ray"], printed["min_replicas"], printed["max_replicas"]) == (True, 1, 8)


def test_without_ray_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--ray", "--port", "0"]) == 2
    assert "pip install '.[serve,ray]' in a checkout" in capsys.readouterr().err.splitlines()[-1]


def test_torchrun_starts_no_replicas(capsys, monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--ray", "--port", "0"]) == 2
    assert "start `redrafter serve --ray` without torchrun" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"num_replica": 2}, ArgumentError, "num_replicas"),
        ({"port": 8000}, ArgumentError, "http_options"),
        ({"num_replicas": "two"}, ArgumentError, "num_replicas must be a whole number"),
        ({"num_replicas": "2", "kv_cache_reuse": "False", "model": "m"}, MissingDependencyError, "pip install"),
    ],
    ids=["unknown", "of the proxy", "no number", "words"],
)
def test_the_application_reads_the_options_of_serve(args, error, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(error, match=message):
        app(args)


@pytest.mark.parametrize("file", ["serve.yaml", "rayservice.yaml"])
def test_the_examples_give_options_that_there_are(file, monkeypatch):
    document = yaml.safe_load((EXAMPLES / file).read_text())
    config = document if "applications" in document else yaml.safe_load(document["spec"]["serveConfigV2"])
    [application] = config["applications"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert application["import_path"] == f"{app.__module__}:{app.__name__}"
    with pytest.raises(MissingDependencyError):  # which is asked for once all options are read
        app({name: value for name, value in application["args"].items() if name != "api_key_file"})
