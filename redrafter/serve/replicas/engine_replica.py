"""A replica: the server's application with an engine of its own, which Ray Serve calls instead of a client."""

import gc
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.loading import LoadEngine
from redrafter.serve.engine_process.start import EngineProcess
from redrafter.serve.log import start_logging
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.replicas.call import AnswerPart, HttpCall, ReplicaLostError
from redrafter.serve.replicas.exchange import answer_parts

__all__ = ["EngineReplica"]

_LOG = logging.getLogger(__name__)

REPLICA_HEADER = b"x-replica"  # of an answer: the name of the replica


class EngineReplica:
    """A server without a socket: routers call it with requests."""

    def __init__(self, options: ServeOptions, load: LoadOptions, draft: DraftOptions, keys: ApiKeys):
        """Load the model in a process of its own.

        Args:
            options: How much is served at once.
            load: The model and its drafter, and how to load them.
            draft: What drafts without a drafter.
            keys: API keys that clients must send.
        """
        from ray import serve

        start_logging(options.log_format, options.log_level)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        process = EngineProcess(LoadEngine(options, load, draft))
        try:
            from redrafter.serve.server import load_server  # it imports torch, as the engine's process does meanwhile

            self._server = load_server(process, options, load, keys)
        except BaseException:
            process.close()
            raise
        self._server.engine.start(_end_with_engine)
        gc.collect()
        gc.freeze()  # what is loaded stays; collecting it takes 0.3 s, in which nothing is written

    async def answer(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        """Yield the answer to a request.

        Raises:
            ReplicaLostError: The engine has ended: what it had not written is no part of the answer.
        """
        async with aclosing(answer_parts(self._server.app, call)) as parts:
            async for part in parts:
                self.check_health()
                yield self._with_name(part)

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

    def _with_name(self, part: AnswerPart) -> AnswerPart:
        """Return a part of an answer, whose headers say which replica has answered."""
        if part.start is None:
            return part
        headers = [*part.start.headers, (REPLICA_HEADER, self._name.encode())]
        return part._replace(start=part.start._replace(headers=headers))


def _end_with_engine(reason: str) -> None:
    """End this process, so that Ray Serve replaces the replica."""
    _LOG.error("%s", reason)
    logging.shutdown()
    os._exit(2)
