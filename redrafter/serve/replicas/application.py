"""The application of Ray Serve: routers that clients talk to, and replicas that write."""

import json
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redrafter.app.config_file import Option, convert_value, options_by_name, unknown_key
from redrafter.app.flags import read_options
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError, MissingDependencyError, how_to_install
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import ApiKeys, collect_keys
from redrafter.serve.replicas.engine_replica import EngineReplica
from redrafter.serve.replicas.options import ReplicaOptions, check_replicated
from redrafter.serve.replicas.router_replica import RouterReplica

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app", "build_application", "import_ray"]

HEALTH_PERIOD_SECONDS = 2.0  # after which a replica that was killed is missed, at the latest
HEALTH_TIMEOUT_SECONDS = 30.0
LOAD_ATTEMPTS = 3
# Ray's queue holds nothing back: the engine has one of its own, which is fair to clients and has a limit.
MAX_ONGOING_REQUESTS = 1 << 16
# Options of what listens, which `serve run` and `serve deploy` start themselves.
OF_RAYS_PROXY = frozenset({"port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"})
ROUTER_CPUS = 0.1  # that Ray sets aside for a router
LOGGING = {"enable_access_log": False}  # the log has a line of its own for each request
EXTRA_DRAIN_SECONDS = 5.0  # that routers have beyond replicas, whose last parts they send


def import_ray() -> Any:
    """Return the module `ray`, with `ray.serve` imported.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise MissingDependencyError(f"replicas need Ray: {how_to_install('serve,ray')}") from error
    return ray


def app(args: Mapping[str, Any]) -> "Application":
    """Build the application of `serve run redrafter.serve.replicas.application:app model=my-merged num_replicas=2`.

    Args:
        args: Options of `redrafter serve --ray` by name, with underscores.
    """
    known = options_by_name((ServeOptions, LoadOptions, DraftOptions, ReplicaOptions))
    if elsewhere := sorted(OF_RAYS_PROXY & set(args)):
        raise ArgumentError(
            f"{elsewhere[0]} is no option of the application: it belongs to http_options of Serve's config"
        )
    if unknown := sorted(set(args) - set(known)):
        raise unknown_key("the application's args", unknown[0], known)
    values = Namespace(**{name: _convert(name, value, known[name]) for name, value in args.items()} | {"ray": True})
    options = read_options(ServeOptions, values)
    keys = collect_keys(options.api_key, options.api_key_file)
    load, draft = read_options(LoadOptions, values), read_options(DraftOptions, values)
    return build_application(options, load, draft, read_options(ReplicaOptions, values), keys)


def build_application(
    options: ServeOptions, load: LoadOptions, draft: DraftOptions, replicas: ReplicaOptions, keys: ApiKeys
) -> "Application":
    """Build the application.

    Args:
        options: How much each replica serves at once, and which requests are accepted.
        load: The model and its drafter, and how to load them.
        draft: What drafts without a drafter.
        replicas: How many replicas there are, and on what.
        keys: API keys that clients must send.

    Raises:
        ArgumentError: An option cannot be kept to by replicas.
        MissingDependencyError: Ray is not installed.
    """
    serve = import_ray().serve
    options = check_replicated(options)
    engines = serve.deployment(
        EngineReplica,
        name="Engine",
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": _count_gpus(load, replicas)},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        logging_config=LOGGING,
        max_constructor_retry_count=LOAD_ATTEMPTS,
        request_router_config={
            "request_router_class": "redrafter.serve.replicas.prefix_router.PrefixRouter",
            "request_router_kwargs": {"target": _target(options, replicas)},
        },
        **_scale(options, replicas),
    ).bind(options, load, draft, keys)
    return serve.deployment(
        serve.ingress()(RouterReplica),
        name="Router",
        num_replicas=replicas.num_routers,
        ray_actor_options={"num_cpus": ROUTER_CPUS},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_timeout + EXTRA_DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        logging_config=LOGGING,
    ).bind(engines, options, keys)


def _convert(name: str, value: Any, option: Option) -> Any:
    """Return an option's value; one that was typed after `serve run` is a text, whatever the option holds."""
    if isinstance(value, str) and option.hint not in (str, str | None):
        with suppress(ValueError):  # told below, where it is of another type
            value = json.loads(value.lower() if value in ("True", "False") else value)
    return convert_value("the application's args", name, value, option)


def _target(options: ServeOptions, replicas: ReplicaOptions) -> float:
    """Return the number of requests above which a replica is full."""
    return replicas.target_ongoing_requests or float(options.max_batch_size)


def _scale(options: ServeOptions, replicas: ReplicaOptions) -> dict[str, Any]:
    """Return Ray's configuration of the number of replicas."""
    if replicas.max_replicas is None:
        return {"num_replicas": replicas.num_replicas or 1}
    return {
        "autoscaling_config": {
            "min_replicas": 1 if replicas.min_replicas is None else replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": _target(options, replicas),
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
        }
    }


def _count_gpus(load: LoadOptions, replicas: ReplicaOptions) -> float:
    """Return the GPUs of a replica."""
    if replicas.num_gpus is not None:
        return replicas.num_gpus
    ray = import_ray()
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return 1.0 if has_gpus and load.device != "cpu" else 0.0
