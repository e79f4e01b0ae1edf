"""Ray Serve's part of the choice of a replica. It is imported by routers alone, since it needs Ray."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from redrafter.extensions.replicas.exchange import HttpCall
from redrafter.extensions.replicas.router import rank_replicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray may not be installed where types are checked
    """Sends calls with the same key to the same replica while that is not full, and others to the least loaded one."""

    def initialize_state(self, target: float) -> None:
        """Set the number of requests that a replica may have, however few the others have."""
        self._target = target
        self._sent: Counter[str] = Counter()  # requests that this router waits for, by the name of the replica

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent to a replica."""
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Uncount a request that is answered, or that could not be sent."""
        name = replica_id.unique_id
        self._sent[name] -= 1
        if self._sent[name] <= 0:
            del self._sent[name]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which a request is offered to them."""
        if pending_request is None or (call := _call(pending_request)) is None or call.key is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where no replica answers, wait before asking again
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        # What replicas tell is late in a rush, but knows of the requests of other routers.
        told = {name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in replicas.items()}
        loads = {name: max(self._sent[name], told[name] or 0) for name in replicas}
        return [[replicas[name]] for name in rank_replicas(call.key, loads, self._target)]


def _call(request: PendingRequest) -> HttpCall | None:
    first: Any = request.args[0] if request.args else None
    return first if isinstance(first, HttpCall) else None
