"""The actors of Ray Serve: replicas, each a server without a socket, and routers, which clients talk to.

A router imports no torch; a replica imports it while its engine's process does too.
"""

import gc
import logging
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.start import EngineProcess, LoadEngine
from redrafter.serve.log import start_logging
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.network.guards import AccessPolicy, Refusal
from redrafter.serve.replicas.exchange import AnswerPart, HttpCall, ReplicaLostError, answer_parts
from redrafter.serve.replicas.router import create_router

_LOG = logging.getLogger(__name__)

REPLICA_HEADER = b"x-replica"  # of an answer: the name of the replica
METRICS_SECONDS = 5.0  # in which replicas must tell their metrics


class EngineReplica:
    """A server without a socket: routers call it with requests."""

    def __init__(self, options: ServeOptions, load: LoadOptions, draft: DraftOptions, keys: ApiKeys):
        """Load the model in a process of its own."""
        from ray import serve

        start_logging(options.log_format, options.log_level)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        process = EngineProcess(LoadEngine(options, load, draft))
        try:
            from redrafter.serve.server import load_server

            self._server = load_server(process, options, load, keys)
        except BaseException:
            process.close()
            raise
        self._server.engine.start(_end_with_engine)
        gc.collect()
        gc.freeze()  # what is loaded stays; collecting it takes 0.3 s, in which nothing is written

    async def answer(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer to a request, whose headers say which replica has answered.

        Raises `ReplicaLostError` if the engine has ended: what it had not written is no part of the answer.
        """
        async with aclosing(answer_parts(self._server.app, call)) as parts:
            async for part in parts:
                self.check_health()
                if part.start is not None:
                    headers = [*part.start.headers, (REPLICA_HEADER, self._name.encode())]
                    part = part._replace(start=part.start._replace(headers=headers))
                yield part

    def metrics(self) -> tuple[str, bytes]:
        """Return the name of the replica, and its metrics in Prometheus' text format."""
        return self._name, self._server.metrics.text()

    def check_health(self) -> None:
        """Raise `ReplicaLostError` if the engine has ended."""
        if not self._server.engine.alive:
            raise ReplicaLostError(f"the engine of replica {self._name} has ended")

    def __del__(self) -> None:
        """End the engine: Ray Serve calls this once the last request is answered."""
        if hasattr(self, "_server"):
            self._server.engine.stop()


def _end_with_engine(reason: str) -> None:
    """End this process, so that Ray Serve replaces the replica."""
    _LOG.error("%s", reason)
    logging.shutdown()
    os._exit(2)


class RouterReplica:
    """The application that hands requests to the replicas of a deployment, of which it has Ray's handle."""

    def __init__(self, engines: Any, options: ServeOptions, keys: ApiKeys):
        start_logging(options.log_format, options.log_level)
        self._engines, self._options, self._keys = engines, options, keys

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, as Ray Serve calls it once after the constructor."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError

        policy = AccessPolicy.of(self._keys, self._options)
        lost = (RayActorError, ReplicaLostError, DeploymentUnavailableError)
        return create_router(self._ask, self._metrics, lost, policy, self._options.max_body_size)

    async def _ask(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        parts = self._engines.options(method_name="answer", stream=True).remote(call)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()  # which does nothing after the end

    async def _metrics(self) -> bytes:
        from ray.serve.exceptions import DeploymentUnavailableError

        answers = self._engines.broadcast("metrics")
        try:
            told = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except DeploymentUnavailableError:  # there are no replicas now
            told = []
        except TimeoutError as error:
            raise Refusal(503, f"a replica has not told its metrics within {METRICS_SECONDS:g} s") from error
        return merge_metrics([answer for answer in told if not isinstance(answer, BaseException)])


def merge_metrics(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the metrics of replicas, by name, in Prometheus' text format with the label `replica`.

    They are not summed here: a sum of counters falls when a replica ends, which Prometheus takes for a restart of all.
    A query sums the rates instead: `sum without (replica) (rate(vllm:generation_tokens_total[1m]))`.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged:
    """A collector of metrics that other processes have collected."""

    def __init__(self, texts: Iterable[tuple[str, bytes]]):
        self._families: dict[str, Metric] = {}
        for replica, text in texts:
            for family in text_string_to_metric_families(text.decode()):
                merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={"replica": replica} | sample.labels))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as a registry calls it."""
        yield from self._families.values()
