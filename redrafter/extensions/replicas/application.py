"""Implement `redrafter serve --ray`: the Ray Serve application, its actors, and the command that runs it.

Routers do not import torch; a replica, a server without a socket, imports it while its engine's process starts.
"""

import gc
import json
import logging
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from redrafter.app.config_file import convert_value, options_by_name
from redrafter.app.drafter_alone import use_base_of_drafter
from redrafter.app.flags import read_options
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.app.program import freeze_objects
from redrafter.errors import ArgumentError, MissingDependencyError, ReDrafterError, how_to_install
from redrafter.extensions.replicas.exchange import AnswerPart, HttpCall, ReplicaLostError, answer_parts
from redrafter.extensions.replicas.options import ReplicaOptions, check_replicated
from redrafter.extensions.replicas.router import create_router
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import EngineProcess, LoadEngine
from redrafter.serve.log import start_logging
from redrafter.serve.network.api_keys import ApiKeys, collect_keys
from redrafter.serve.network.guards import AccessPolicy
from redrafter.serve.protocol.requests import ApiError

if TYPE_CHECKING:
    from ray.serve import Application

HEALTH_PERIOD_SECONDS = 2.0  # longest time until a killed replica is detected
HEALTH_TIMEOUT_SECONDS = 30.0
LOAD_ATTEMPTS = 3
# High enough that Ray queues nothing: the engine has its own queue, which is bounded and fair to clients.
MAX_ONGOING_REQUESTS = 1 << 16
# Options of the HTTP listener, which `serve run` and `serve deploy` start themselves.
OF_RAYS_PROXY = frozenset({"port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"})
ROUTER_CPUS = 0.1  # CPUs that Ray reserves for a router
LOGGING = {"enable_access_log": False}  # the server logs each request itself
EXTRA_DRAIN_SECONDS = 5.0  # routers drain longer than replicas, whose last parts they relay
_LOG = logging.getLogger(__name__)
APPLICATION = "redrafter"  # name of the application in Ray Serve
POLL_SECONDS = 0.2  # polling interval of the application's state
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30  # time that a connection may be idle
# Seconds between two parts of an answer, for each other request of the replica, and at most. A part costs a router a
# fixed time, and one router serves several replicas (docs/ray.md).
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1e-3, 0.1
REPLICA_HEADER = b"x-replica"  # response header with the name of the replica
METRICS_SECONDS = 5.0  # time limit for replicas to return their metrics


def pause(requests: int) -> float:
    """Return the seconds between two parts of an answer, where a replica has so many requests."""
    return min(PAUSE_SECONDS * (requests - 1), MAX_PAUSE_SECONDS)


def import_ray() -> Any:
    """Return the module `ray`, with `ray.serve` imported, or raise `MissingDependencyError`."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise MissingDependencyError(f"replicas need Ray: {how_to_install('serve,ray')}") from error
    return ray


def app(args: Mapping[str, Any]) -> "Application":
    """Build the application of `serve run redrafter.serve.replicas.application:app model=my-merged num_replicas=2`.

    The arguments are options of `redrafter serve --ray` by name, with underscores.
    """
    known = options_by_name((ServeOptions, LoadOptions, DraftOptions, ReplicaOptions))
    if elsewhere := sorted(OF_RAYS_PROXY & set(args)):
        raise ArgumentError(
            f"{elsewhere[0]} is no option of the application: it belongs to http_options of Serve's config"
        )
    values = {}
    for name, value in args.items():
        # Arguments of `serve run` are strings, even for options of other types.
        if isinstance(value, str) and name in known and known[name].hint not in (str, str | None):
            with suppress(ValueError):  # a wrong type is reported below
                value = json.loads(value.lower() if value in ("True", "False") else value)
        values[name] = convert_value("the application's args", name, value, known)
    given = Namespace(**values | {"ray": True})
    model = Path(str(values.get("model") or "."))
    if model.exists() or not model.is_absolute():  # a directory need exist on the replicas' machines only
        use_base_of_drafter(given)
    options = read_options(ServeOptions, given)
    keys = collect_keys(options.api_key, options.api_key_file)
    load, draft = read_options(LoadOptions, given), read_options(DraftOptions, given)
    return build_application(options, load, draft, read_options(ReplicaOptions, given), keys)


def build_application(
    options: ServeOptions, load: LoadOptions, draft: DraftOptions, replicas: ReplicaOptions, keys: ApiKeys
) -> "Application":
    """Build the Ray Serve application of routers and replicas of the model."""
    ray = import_ray()
    options = check_replicated(options)
    target = replicas.target_ongoing_requests or float(options.max_batch_size)  # requests of a full replica
    scale: dict[str, Any] = {"num_replicas": replicas.num_replicas or 1}
    if replicas.max_replicas is not None:
        autoscaling = {
            "min_replicas": 1 if replicas.min_replicas is None else replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": target,
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
        }
        scale = {"autoscaling_config": autoscaling}
    num_gpus = replicas.num_gpus
    if num_gpus is None:
        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
        num_gpus = 1.0 if has_gpus and load.device != "cpu" else 0.0
    shared = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "logging_config": LOGGING,
    }
    engines = ray.serve.deployment(
        EngineReplica,
        name="Engine",
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": num_gpus},
        graceful_shutdown_timeout_s=options.drain_timeout,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        max_constructor_retry_count=LOAD_ATTEMPTS,
        request_router_config={
            "request_router_class": "redrafter.extensions.replicas.prefix_router.PrefixRouter",
            "request_router_kwargs": {"target": target},
        },
        **shared,
        **scale,
    ).bind(options, load, draft, keys)
    return ray.serve.deployment(
        # Routers are a separate deployment, so that clients' connections survive the loss of a replica.
        ray.serve.ingress()(RouterReplica),
        name="Router",
        num_replicas=replicas.num_routers,
        ray_actor_options={"num_cpus": ROUTER_CPUS},
        graceful_shutdown_timeout_s=options.drain_timeout + EXTRA_DRAIN_SECONDS,
        **shared,
    ).bind(engines, options, keys)


def serve_replicas(
    options: ServeOptions,
    load: LoadOptions,
    draft: DraftOptions,
    replicas: ReplicaOptions,
    keys: ApiKeys,
    ready: Callable[[], object],
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end. `ready` is called once replicas serve."""
    ray = import_ray()
    signalled = threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user opts in
    try:
        ray.init(address=replicas.ray_address, namespace="redrafter", logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = replicas.ray_address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise ArgumentError(f"there is no Ray cluster at {where}: give another --ray-address ({error})") from error
    # After `ray.init`, which installs its own handlers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: signalled.set())
    try:
        application = build_application(options, load, draft, replicas, keys)
        proxy = {
            name: getattr(options, name) for name in ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        }
        http_options = proxy | {"keep_alive_timeout_s": KEEP_ALIVE_SECONDS}
        ray.serve.start(proxy_location="HeadOnly", http_options=http_options)
        target = ray.serve.RunTarget(application, name=APPLICATION, route_prefix="/")
        # Not waiting here lets a signal stop the command while replicas load.
        ray.serve.run_many([target], wait_for_applications_running=False)
        try:
            if _wait_until_running(ray, signalled):
                _check_address(options)
                ready()
                signalled.wait()
                _LOG.info("stopping: running texts are still written, for %g s at most", options.drain_timeout)
        finally:
            ray.serve.delete(APPLICATION)  # waits for running requests
            if not ray.serve.status().applications:
                ray.serve.shutdown()  # a proxy keeps its address; the next command may need another
    finally:
        ray.shutdown()  # ends only a cluster that was started here


def _wait_until_running(ray: Any, signalled: threading.Event) -> bool:
    """Wait until all replicas serve, or raise their error; return False if a signal arrives first."""
    while not signalled.wait(POLL_SECONDS):
        status = ray.serve.status().applications[APPLICATION]
        if status.status == "RUNNING":
            return True
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [deployment.message for deployment in status.deployments.values() if deployment.message]
            [message, *_] = messages or [status.message]
            # The last line of a traceback names the error.
            raise ReDrafterError(f"the replicas cannot be loaded: {message.strip().splitlines()[-1]}")
    return False


def _check_address(options: ServeOptions) -> None:
    """Raise `ReDrafterError` if Ray's proxy has another address, which a proxy that was already running keeps."""
    try:
        socket.create_connection((options.host, options.port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ReDrafterError(
            f"Ray Serve does not listen on {options.host}:{options.port}: it runs on this cluster since before, or the "
            "cluster's head is another machine; there, type: serve run redrafter.serve.replicas.application:app"
        ) from error


class EngineReplica:
    """A replica: a server without a socket, which routers call with requests."""

    def __init__(self, options: ServeOptions, load: LoadOptions, draft: DraftOptions, keys: ApiKeys):
        from ray import serve

        start_logging(options.log_format, options.log_level)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        process = EngineProcess(LoadEngine(options, load, draft))
        try:
            from redrafter.serve.routes.app import server_app
            from redrafter.serve.server import load_server

            self._server = load_server(process, options, load, keys)
            self._app = server_app(self._server)
        # Ray starts a new actor after a failure; this one's engine process must not keep the GPU.
        except BaseException:
            process.close()
            raise
        self._server.engine.start(_end_with_engine)
        self._requests = 0  # in progress
        gc.collect()
        freeze_objects()  # loaded objects stay alive; scanning them would stop decoding for 0.3 s

    async def answer(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer to a request; its headers name this replica.

        Raises `ReplicaLostError` if the engine ends before the answer is complete.
        """
        self._requests += 1
        try:
            async with aclosing(answer_parts(self._app, call, lambda: pause(self._requests))) as parts:
                async for part in parts:
                    self.check_health()
                    if part.start is not None:
                        headers = [*part.start.headers, (REPLICA_HEADER, self._name.encode())]
                        part = part._replace(start=part.start._replace(headers=headers))
                    yield part
        finally:
            self._requests -= 1

    def metrics(self) -> tuple[str, bytes]:
        """Return the name of the replica, and its metrics in Prometheus' text format."""
        return self._name, self._server.metrics.text()

    def check_health(self) -> None:
        """Raise `ReplicaLostError` if the engine has ended or hangs."""
        if not self._server.engine.healthy:
            raise ReplicaLostError(f"the engine of replica {self._name} has ended or hangs")

    def __del__(self) -> None:
        """End the engine: Ray Serve calls this after the last request."""
        if hasattr(self, "_server"):
            self._server.close()


def _end_with_engine(reason: str) -> None:
    _LOG.error("%s", reason)
    logging.shutdown()
    os._exit(2)


class RouterReplica:
    """A router: an application that forwards requests to replicas through Ray's handle of their deployment."""

    def __init__(self, engines: Any, options: ServeOptions, keys: ApiKeys):
        start_logging(options.log_format, options.log_level)
        self._engines, self._options, self._keys = engines, options, keys

    def __serve_build_asgi_app__(self) -> Any:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError

        policy = AccessPolicy.from_options(self._keys, self._options)
        lost = (RayActorError, ReplicaLostError, DeploymentUnavailableError)
        return create_router(self._ask, self._metrics, lost, policy, self._options.max_body_size)

    async def _ask(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        parts = self._engines.options(method_name="answer", stream=True).remote(call)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()  # has no effect after the end

    async def _metrics(self) -> bytes:
        from ray.serve.exceptions import DeploymentUnavailableError

        answers = self._engines.broadcast("metrics")
        try:
            told = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except DeploymentUnavailableError:  # no replica is running
            told = []
        except TimeoutError as error:
            raise ApiError(503, f"a replica did not return its metrics within {METRICS_SECONDS:g} s") from error
        return merge_metrics([answer for answer in told if not isinstance(answer, BaseException)])


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Merge the metrics of named replicas in Prometheus' text format, with the label `replica`.

    The metrics are not summed here: a sum of counters falls when a replica ends, which Prometheus interprets as a reset
    of all. Sum rates in the query: `sum without (replica) (rate(vllm:generation_tokens_total[1m]))`.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged:
    def __init__(self, texts: Iterable[tuple[str, bytes]]):
        self._families: dict[str, Metric] = {}
        for replica, text in texts:
            for family in text_string_to_metric_families(text.decode()):
                merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={"replica": replica} | sample.labels))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this."""
        yield from self._families.values()
