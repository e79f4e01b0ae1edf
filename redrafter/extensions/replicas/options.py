"""Define the options of `redrafter serve --ray`."""

from dataclasses import dataclass, fields
from typing import Any

from redrafter.app.flags import flag
from redrafter.errors import ArgumentError, how_to_install
from redrafter.options import check_values, option, whole

_HELP = f"serve N replicas (default: 1) of the model on Ray Serve: {how_to_install('serve,ray')}"
_COUNT = whole(1, optional=True)
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of `redrafter serve --ray`: number of replicas, and resources of each.

    Attributes:
        num_replicas: replicas, in place of the N of --ray
        max_replicas: start more replicas under load, up to this number
        session_affinity: send requests with the same X-Session-Id to one replica, others at random
        num_cpus: CPU cores that Ray reserves for a replica
        num_gpus: GPUs of a replica (default: 1 if the cluster has GPUs, 0 with --device cpu)
    """

    ray: int | None = option(None, _HELP, nargs="?", const=1, check=_COUNT)
    num_replicas: int | None = option(None, check=_COUNT)
    max_replicas: int | None = option(None, check=_COUNT)
    session_affinity: bool = False
    num_cpus: float = 1.0
    num_gpus: float | None = None

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if given and self.ray is None:
            raise ArgumentError(f"{flag(given[0])} is for replicas: add --ray")
        check_values(self)

    def deployment(self, target: int) -> dict[str, Any]:
        """Return options of Ray's deployment; more replicas are started above `target` requests each."""
        least = self.num_replicas or self.ray
        router = {"request_router_config": {"request_router_class": SESSION_ROUTER}} if self.session_affinity else {}
        if self.max_replicas is None:
            return router | {"num_replicas": least}
        bounds = {"min_replicas": least, "max_replicas": self.max_replicas}
        return router | {"autoscaling_config": bounds | {"target_ongoing_requests": target}}
