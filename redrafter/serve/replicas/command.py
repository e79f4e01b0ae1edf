"""`redrafter serve --ray`: start replicas on Ray Serve, wait for a signal, let running requests end."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError, ReDrafterError
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.application import build_application, import_ray
from redrafter.serve.replicas.options import ReplicaOptions

__all__ = ["serve_replicas"]

_LOG = logging.getLogger(__name__)

APPLICATION = "redrafter"  # its name in Ray Serve
POLL_SECONDS = 0.2  # between looks at the state of the application
CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 30  # that a connection may be idle for


def serve_replicas(
    options: ServeOptions,
    load: LoadOptions,
    draft: DraftOptions,
    replicas: ReplicaOptions,
    keys: ApiKeys,
    ready: Callable[[], object],
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests end within `--drain-timeout`.

    Args:
        options: How the server listens, and how much each replica serves at once.
        load: The model and its drafter, and how to load them.
        draft: What drafts without a drafter.
        replicas: How many replicas there are, and on what.
        keys: API keys that clients must send.
        ready: Called once replicas serve.

    Raises:
        ReDrafterError: Ray cannot be reached, or the replicas cannot be loaded.
    """
    ray = import_ray()
    signalled = threading.Event()
    _connect(ray, replicas)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: signalled.set())
    try:
        application = build_application(options, load, draft, replicas, keys)
        ray.serve.start(proxy_location="HeadOnly", http_options=_http_options(options))
        _serve_until_signal(ray, application, options, signalled, ready)
    finally:
        ray.shutdown()  # ends a cluster that was started here, and no other


def _serve_until_signal(
    ray: Any, application: Any, options: ServeOptions, signalled: threading.Event, ready: Callable[[], object]
) -> None:
    target = ray.serve.RunTarget(application, name=APPLICATION, route_prefix="/")
    ray.serve.run_many([target], wait_for_applications_running=False)
    try:
        if _wait_until_running(ray, signalled):
            _check_address(options)
            ready()
            signalled.wait()
            _LOG.info("stopping: running texts are still written, for %g s at most", options.drain_timeout)
    finally:
        ray.serve.delete(APPLICATION)  # waits until running requests have ended
        if not ray.serve.status().applications:
            ray.serve.shutdown()  # so that its proxy listens where the next command says


def _connect(ray: Any, replicas: ReplicaOptions) -> None:
    """Connect to the Ray cluster, or start one on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a new cluster reports to nobody unless the user says so
    try:
        ray.init(address=replicas.ray_address, namespace="redrafter", logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = replicas.ray_address or os.environ.get("RAY_ADDRESS") or "this machine"
        raise ArgumentError(f"there is no Ray cluster at {where}: give another --ray-address ({error})") from error


def _http_options(options: ServeOptions) -> dict[str, Any]:
    """Return how Ray's proxy listens."""
    return {
        "host": options.host,
        "port": options.port,
        "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
    }


def _wait_until_running(ray: Any, signalled: threading.Event) -> bool:
    """Wait until all replicas serve, and return whether they do: not if a signal came before.

    Raises:
        ReDrafterError: They cannot be loaded.
    """
    while not signalled.wait(POLL_SECONDS):
        status = ray.serve.status().applications[APPLICATION]
        if status.status == "RUNNING":
            return True
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [deployment.message for deployment in status.deployments.values() if deployment.message]
            raise ReDrafterError(f"the replicas cannot be loaded: {_last_line(messages or [status.message])}")
    return False


def _check_address(options: ServeOptions) -> None:
    """Raise `ReDrafterError` if Ray's proxy listens elsewhere: where it has run before, it keeps its own address."""
    try:
        socket.create_connection((options.host, options.port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ReDrafterError(
            f"Ray Serve does not listen on {options.host}:{options.port}: it runs on this cluster since before, or the "
            "cluster's head is another machine; there, type: serve run redrafter.serve.replicas.application:app"
        ) from error


def _last_line(messages: Sequence[str]) -> str:
    """Return the last line of a traceback, which tells the error."""
    return messages[0].strip().splitlines()[-1]
