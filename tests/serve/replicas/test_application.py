"""The application of Ray Serve, by what Ray is told of it."""

import pytest

pytest.importorskip("fastapi")

from helpers.fake_ray import Deployment, FakeRay
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.serve.config import ReplicaOptions, ServeOptions
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.application import app, build_application


def built(load: LoadOptions | None = None, **replicas: object) -> tuple[Deployment, Deployment]:
    """The routers and the engines of an application."""
    options = ServeOptions(api_key=("secret",), max_batch_size=12, drain_timeout=7.0)
    choice = ReplicaOptions(ray=True, **replicas)
    routers = build_application(options, load or LoadOptions(), DraftOptions(), choice, ApiKeys(["secret"]))
    return routers, routers.arguments[0]


@pytest.fixture(autouse=True)
def ray(monkeypatch) -> FakeRay:
    return FakeRay().install(monkeypatch)


def test_a_number_of_replicas_is_kept():
    _, engines = built(num_replicas=3)
    assert engines.config["num_replicas"] == 3
    assert "autoscaling_config" not in engines.config


def test_the_number_of_replicas_follows_their_requests():
    _, engines = built(max_replicas=4, upscale_delay_s=1.0)
    assert engines.config["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": 12.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 600.0,
    }


def test_a_replica_is_full_for_the_router_when_more_are_started():
    _, engines = built(max_replicas=4, target_ongoing_requests=5.0)
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
