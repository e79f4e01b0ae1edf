"""`redrafter serve --ray`: its options, the application that Ray gets, and its life from its start to a signal."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.fake_ray import Deployment, FakeRay
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.cli import main
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.extensions.replicas.options import ReplicaOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import ApiKeys

pytest.importorskip("fastapi")

from redrafter.extensions.replicas.launch import app, build_application, launch
from redrafter.serve.engine_process.start import LoadEngine

EXAMPLES = Path(__file__).parents[4] / "examples" / "ray"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def request(load: LoadOptions | None = None, **options: Any) -> LoadEngine:
    return LoadEngine(ServeOptions(port=0, **options), load or LoadOptions(), DraftOptions())


def serve(operators: ApiKeys | None = None) -> None:
    launch(ReplicaOptions(ray=2), request(), ApiKeys(), operators or ApiKeys())


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_serves_until_a_signal_and_leaves_nothing_running(monkeypatch):
    ray = FakeRay(run=terminate).install(monkeypatch)
    serve()
    assert ray.calls == ["init", "start", "run", "delete", "shutdown"]


def test_replicas_that_cannot_be_loaded_give_one_line(monkeypatch):
    def fail() -> None:
        raise RuntimeError("Deploying application redrafter failed")

    message = "Traceback:\n  File x\nredrafter.errors.CheckpointError: no such model\n"
    ray = FakeRay(run=fail, message=message).install(monkeypatch)
    with pytest.raises(ReDrafterError, match=r"cannot be loaded: redrafter\.errors\.CheckpointError: no such model$"):
        serve()
    assert ray.calls[-1] == "shutdown"


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    FakeRay(init_error=ConnectionError("refused")).install(monkeypatch)
    with pytest.raises(ArgumentError, match=r"cluster of RAY_ADDRESS.*refused"):
        serve()


def test_operators_and_torchrun_are_refused(monkeypatch, capsys):
    FakeRay().install(monkeypatch)
    with pytest.raises(ArgumentError, match="without torchrun, --tensor-parallel-size and operators"):
        serve(ApiKeys(["secret"], "operator"))
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--ray", "--port", "0"]) == 2
    assert "without torchrun" in capsys.readouterr().err.splitlines()[-1]


def test_without_ray_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--ray", "--port", "0"]) == 2
    assert "pip install '.[serve,ray]' in a checkout" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 2}, "--num-replicas is for replicas: add --ray"),
        ({"ray": 0}, "ray must be a positive integer"),
        ({"ray": 1, "num_replicas": 0}, "num_replicas must be a positive integer"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        ReplicaOptions(**options)


@pytest.mark.parametrize("words", [["--ray", "3"], ["--ray", "--num-replicas", "3"], ["--num-replicas", "3", "--ray"]])
def test_a_number_of_replicas_is_given_in_two_ways(words, capsys):
    assert main(["serve", *words, "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    options = ReplicaOptions(ray=printed["ray"], num_replicas=printed["num_replicas"])
    assert options.deployment(8) == {"num_replicas": 3}


def built(load: LoadOptions | None = None, **replicas: Any) -> Deployment:
    options = {"api_key": ("secret",), "max_batch_size": 12, "drain_timeout": 7.0}
    keys = ApiKeys(["secret"])
    deployment: Deployment = build_application(request(load, **options), ReplicaOptions(**{"ray": 1} | replicas), keys)
    return deployment


def test_the_number_of_replicas_may_follow_the_load(monkeypatch):
    FakeRay().install(monkeypatch)
    expected = {"min_replicas": 2, "max_replicas": 4, "target_ongoing_requests": 12}
    assert built(ray=2, max_replicas=4).config["autoscaling_config"] == expected


def test_sessions_stay_with_a_replica_where_that_is_asked_for(monkeypatch):
    FakeRay().install(monkeypatch)
    assert "request_router_config" not in built().config
    router = built(session_affinity=True).config["request_router_config"]["request_router_class"]
    assert router.endswith("ConsistentHashRouter")


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
def test_a_replica_gets_a_gpu_where_there_are_any(gpus, load, options, expected, monkeypatch):
    FakeRay(resources={"GPU": gpus}).install(monkeypatch)
    assert built(load, **options).config["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": expected}


def test_other_machines_get_the_digests_of_keys_alone(monkeypatch):
    FakeRay().install(monkeypatch)
    deployment = built()
    assert "secret" not in repr(deployment.arguments)
    assert deployment.arguments[1].client(b"Bearer secret") == "key-1"
    assert deployment.config["graceful_shutdown_timeout_s"] == 7.0


@pytest.mark.parametrize("flag", ["--allow-runtime-lora-updating", "--max-connections 9", "--operator-key secret"])
def test_options_of_a_single_server_are_refused(flag):
    with pytest.raises(ArgumentError, match=flag.split()[0]):
        app({"command": f"--ray {flag}"})


def test_an_application_reads_the_command_of_serve(monkeypatch):
    FakeRay().install(monkeypatch)
    deployment = app({"command": "--ray 2 --no-kv-cache-reuse --api-key secret"})
    engine, keys = deployment.arguments
    assert deployment.config["num_replicas"] == 2
    assert not engine.options.kv_cache_reuse
    assert keys.client(b"Bearer secret") == "key-1"


@pytest.mark.parametrize("file", ["serve.yaml", "rayservice.yaml"])
def test_the_examples_give_options_that_exist(file, monkeypatch, tmp_path):
    document = yaml.safe_load((EXAMPLES / file).read_text())
    config = document if "applications" in document else yaml.safe_load(document["spec"]["serveConfigV2"])
    [application] = config["applications"]
    assert application["import_path"] == f"{app.__module__}:{app.__name__}"
    FakeRay().install(monkeypatch)
    (tmp_path / "keys").write_text("secret\n")
    command = application["args"]["command"].replace("/models/my-merged ", "")
    app({"command": command.replace("/etc/redrafter", str(tmp_path))})
