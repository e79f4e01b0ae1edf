"""Choose replicas by prefix within Ray Serve. Only routers import this module, since it needs Ray."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from redrafter.extensions.replicas.exchange import HttpCall
from redrafter.extensions.replicas.router import rank_replicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray may be missing during type checks
    """Routes calls with the same key to the same replica until it is full, and others to the least loaded one."""

    def initialize_state(self, target: float) -> None:
        """Set the number of requests that any replica may have, regardless of the others' loads."""
        self._target = target
        self._sent: Counter[str] = Counter()  # pending requests of this router, by name of the replica

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent to a replica."""
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request that was answered or could not be sent."""
        name = replica_id.unique_id
        self._sent[name] -= 1
        if self._sent[name] <= 0:
            del self._sent[name]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which to try them for a request."""
        if pending_request is None or (call := _call(pending_request)) is None or call.key is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if no replica accepts, wait before retrying
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # Loads reported by replicas lag during bursts, but include other routers' requests: take the larger value.
        told = {name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in replicas.items()}
        loads = {name: max(self._sent[name], told[name] or 0) for name in replicas}
        return [[replicas[name]] for name in rank_replicas(call.key, loads, self._target)]


def _call(request: PendingRequest) -> HttpCall | None:
    first: Any = request.args[0] if request.args else None
    return first if isinstance(first, HttpCall) else None
