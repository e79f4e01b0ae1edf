"""Implement a replica: the server's application, called by Ray Serve, with an engine in a process of its own."""

import logging
import os
from collections.abc import Iterable
from itertools import chain
from threading import Timer
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from ray import serve
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.app.program import freeze_objects, import_libraries
from redrafter.serve.engine_process.start import EngineProcess, LoadEngine
from redrafter.serve.log import start_logging
from redrafter.serve.network.api_keys import ApiKeys

METRICS_SECONDS = 5.0  # time limit for replicas to return their metrics
LAST_EVENT_SECONDS = 1.0  # time for streams to send the error of an engine that has ended


class Replica:
    """A server without a socket. Its answers have the header `X-Replica`; `/metrics` has those of all replicas."""

    def __init__(self, request: LoadEngine, keys: ApiKeys):
        start_logging(request.options.log_format, request.options.log_level)
        context = serve.get_replica_context()
        self._name, self._deployment = context.replica_id.unique_id, (context.deployment, context.app_name)
        process = EngineProcess(request)
        module = import_libraries("redrafter.serve.server")
        self._server = module.load_server(process, request.options, request.load, keys)
        self._server.engine.after_end = f"replica {self._name} is lost, send the request again"
        self._server.engine.start(self._end)
        freeze_objects()  # loaded objects stay alive; scanning them would stop decoding for 0.3 s

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; Ray calls this once the replica is created."""
        from redrafter.serve.network.guards import JsonRoute
        from redrafter.serve.routes.app import server_app

        app = server_app(self._server)
        app.routes.insert(0, JsonRoute("/metrics", self._all_metrics))  # before the server's own

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_named(message: Message) -> None:
                if message["type"] == "http.response.start":  # Ray's proxy adds the request's id itself
                    others = (header for header in message["headers"] if header[0] != b"x-request-id")
                    message["headers"] = [*others, (b"x-replica", self._name.encode())]
                await send(message)

            await app(scope, receive, send_named)

        return answer

    def metrics(self) -> list[Metric]:
        """Return the metrics of this replica, with its name as the label `replica`."""
        families = list(self._server.metrics.registry.collect())
        for family in families:
            family.samples = [each._replace(labels={"replica": self._name} | each.labels) for each in family.samples]
        return families

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine has ended or hangs; Ray then replaces the replica."""
        if not self._server.engine.healthy:
            raise RuntimeError(f"the engine of replica {self._name} has ended or hangs")

    def __del__(self) -> None:
        """End the engine: Ray calls this after the last request."""
        if hasattr(self, "_server"):
            self._server.close()

    def _end(self, reason: str) -> None:
        logging.getLogger(__name__).error("%s", reason)
        Timer(LAST_EVENT_SECONDS, os._exit, (2,)).start()  # Ray starts another replica once this process has ended

    async def _all_metrics(self) -> Response:
        answers = serve.get_deployment_handle(*self._deployment).broadcast("metrics")
        found = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        text = merge_metrics(families for families in found if isinstance(families, list))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def merge_metrics(replicas: Iterable[list[Metric]]) -> bytes:
    """Return the metrics of replicas in Prometheus' text format.

    They are not summed: a sum of counters falls when a replica ends, which Prometheus interprets as a reset.
    """
    merged: dict[str, Metric] = {}
    for family in chain.from_iterable(replicas):
        if (first := merged.setdefault(family.name, family)) is not family:
            first.samples += family.samples
    return generate_latest(SimpleNamespace(collect=merged.values))
