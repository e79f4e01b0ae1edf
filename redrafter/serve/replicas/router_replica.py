"""A router: what clients talk to, in an actor of Ray Serve. It imports no torch."""

from collections.abc import AsyncGenerator
from typing import Any

from redrafter.serve.config import ServeOptions
from redrafter.serve.log import start_logging
from redrafter.serve.network.access import AccessPolicy, Refusal
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.call import AnswerPart, HttpCall, ReplicaLostError
from redrafter.serve.replicas.merged_metrics import merge_metrics
from redrafter.serve.replicas.router import create_router

__all__ = ["RouterReplica"]

METRICS_SECONDS = 5.0  # in which replicas must tell their metrics


class RouterReplica:
    """The application that hands requests to replicas, in an actor of Ray Serve."""

    def __init__(self, engines: Any, options: ServeOptions, keys: ApiKeys):
        """Remember the deployment of replicas.

        Args:
            engines: Ray's handle to it.
            options: Which requests are accepted.
            keys: API keys that clients must send.
        """
        start_logging(options.log_format, options.log_level)
        self._engines, self._options, self._keys = engines, options, keys

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, as Ray Serve calls it once after the constructor."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError

        options = self._options
        policy = AccessPolicy.of(
            self._keys, options.host, options.allowed_hosts, options.allowed_origins, options.open_metrics
        )
        lost = (RayActorError, ReplicaLostError, DeploymentUnavailableError)
        return create_router(self._ask, self._metrics, lost, policy, options.max_body_size)

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
