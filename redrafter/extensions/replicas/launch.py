"""Run `redrafter serve --ray`, and build its application for configurations of Ray Serve."""

import logging
import os
import shlex
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from redrafter.errors import ArgumentError, MissingDependencyError, ReDrafterError, how_to_install
from redrafter.extensions.replicas.options import ReplicaOptions
from redrafter.parallel.launched import launched_processes
from redrafter.serve.command import listen, read_request
from redrafter.serve.engine_process.start import LoadEngine
from redrafter.serve.network.api_keys import ApiKeys, collect_keys

APPLICATION = "redrafter"  # name of the application in Ray Serve


def launch(replicas: ReplicaOptions, request: LoadEngine, keys: ApiKeys, operators: ApiKeys) -> None:
    """Serve with replicas until SIGINT or SIGTERM, then let running requests end.

    Raises `ArgumentError` for what replicas or Ray do not support, and `ReDrafterError` if they cannot be loaded.
    """
    if find_spec("ray") is None:
        raise MissingDependencyError(f"replicas need Ray: {how_to_install('serve,ray')}")
    import ray.serve

    if launched_processes() > 1 or request.load.tensor_parallel_size not in (None, 1) or operators:
        raise ArgumentError(
            "--ray serves independent replicas: start it without torchrun, --tensor-parallel-size and operators' keys"
        )
    with listen(request.options) as listening:  # a port in use is reported before the model loads
        options = replace(request.options, port=listening.getsockname()[1])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user opts in
    try:
        ray.init(namespace=APPLICATION, logging_level=logging.WARNING)
        application = build_application(replace(request, options=options), replicas, keys)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"Ray refuses the cluster of RAY_ADDRESS, or an option of replicas: {error}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # in place of Ray's own handler
    proxy = ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    ray.serve.start(proxy_location="HeadOnly", http_options={name: getattr(options, name) for name in proxy})
    try:
        ray.serve.run(application, name=APPLICATION, route_prefix="/")  # logs the address once replicas serve
        threading.Event().wait()
    except KeyboardInterrupt:
        return
    except RuntimeError as error:
        states = ray.serve.status().applications[APPLICATION].deployments.values()
        # The last line of a traceback names the error.
        reason = "".join(state.message for state in states).strip().splitlines() or [str(error)]
        raise ReDrafterError(f"the replicas cannot be loaded: {reason[-1]}") from error
    finally:
        ray.serve.delete(APPLICATION)  # waits for running requests
        if not ray.serve.status().applications:
            ray.serve.shutdown()  # a proxy keeps its address; the next command may need another


def app(args: Mapping[str, str]) -> Any:
    """Build the application of `serve run redrafter.extensions.replicas.launch:app command="my-merged --ray 2"`.

    The command is what follows `redrafter serve`; the address and TLS are those of Ray's `http_options`.
    """
    _, request, added = read_request(shlex.split(args["command"]))
    [replicas] = (options for options in added if isinstance(options, ReplicaOptions))
    return build_application(request, replicas, collect_keys(request.options.api_key, request.options.api_key_file))


def build_application(request: LoadEngine, replicas: ReplicaOptions, keys: ApiKeys) -> Any:
    """Build the Ray Serve application of replicas of the model. They get the digests of the keys alone."""
    options = replace(request.options, api_key=(), api_key_file=None)
    if options.operator_key or options.allow_runtime_lora_updating or options.max_connections:
        unsupported = "--operator-key, --allow-runtime-lora-updating and --max-connections"
        raise ArgumentError(f"{unsupported} are of one server, which --ray does not start: leave them out")
    import ray.serve

    from redrafter.extensions.replicas.replica import Replica

    num_gpus = replicas.num_gpus
    if num_gpus is None:
        num_gpus = float(request.load.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
    deployment = ray.serve.deployment(
        ray.serve.ingress()(Replica),
        name="Replica",
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": num_gpus},
        # Ray holds no request back: the engine's queue is bounded and fair to clients.
        max_ongoing_requests=1 << 16,
        health_check_period_s=2.0,
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=options.drain_timeout,
        logging_config={"enable_access_log": False},  # the server logs each request itself
        **replicas.deployment(options.max_batch_size),
    )
    return deployment.bind(replace(request, options=options), keys)
