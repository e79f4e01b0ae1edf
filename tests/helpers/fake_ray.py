"""Stands for what this library uses of Ray, so that its side is tested where Ray is not installed."""

import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class Deployment:
    """A class with its configuration, and what its constructor is given."""

    made: type
    config: dict[str, Any]
    arguments: tuple[Any, ...] = ()

    def bind(self, *arguments: Any) -> "Deployment":
        self.arguments = arguments
        return self


@dataclass
class FakeRay:
    """A cluster, whose application has these states one after the other, with their messages."""

    states: Iterable[tuple[str, str]] = (("RUNNING", ""),)
    resources: dict[str, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    init_error: Exception | None = None

    def install(self, patch: pytest.MonkeyPatch) -> "FakeRay":
        """Let `import ray` find this one."""
        states = iter(self.states)
        serve = _module("ray.serve", ingress=lambda: lambda made: made)
        serve.deployment = lambda made, **config: Deployment(made, config)
        serve.get_replica_context = lambda: SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
        serve.RunTarget = lambda target, name, route_prefix: target
        serve.status = lambda: SimpleNamespace(applications=self._applications(next(states, None)))
        for name in ("start", "run_many", "delete", "shutdown"):
            setattr(serve, name, lambda *_, _name=name, **__: self.calls.append(_name))
        ray = _module("ray", serve=serve, init=self._init, is_initialized=lambda: True)
        ray.cluster_resources, ray.shutdown = lambda: self.resources, lambda: self.calls.append("end")
        router = {name: object for name in ("PendingRequest", "ReplicaID", "RunningReplica")}
        modules = (
            ray,
            serve,
            _module("ray.exceptions", RayActorError=type("RayActorError", (Exception,), {})),
            _module("ray.serve.exceptions", DeploymentUnavailableError=FakeUnavailableError),
            _module("ray.serve.request_router", RequestRouter=FakeRequestRouter, **router),
        )
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)
        return self

    def _init(self, **_: Any) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.calls.append("init")

    def _applications(self, state: tuple[str, str] | None) -> dict[str, Any]:
        if state is None:
            return {}
        status, message = state
        deployments = {"Engine": SimpleNamespace(message=message)}
        return {"redrafter": SimpleNamespace(status=status, message="", deployments=deployments)}


class FakeUnavailableError(Exception):
    """Ray's error where there are no replicas."""


class FakeRequestRouter:
    """Ray's half of the choice of a replica; `told` holds what replicas have told of their queues."""

    def __init__(self) -> None:
        self.told: dict[Any, int] = {}

    @property
    def replica_queue_len_cache(self) -> dict[Any, int]:
        return self.told

    def on_send_request(self, replica_id: Any) -> None:
        pass


class FakeHandle:
    """Ray's handle to replicas, of which each call is answered with the same parts."""

    def __init__(self, parts: list[Any], metrics: list[Any] | Exception):
        self._parts, self._metrics, self.cancelled = parts, metrics, 0

    def options(self, **options: Any) -> "FakeHandle":
        assert options == {"method_name": "answer", "stream": True}
        return self

    def remote(self, call: Any) -> "FakeHandle":
        return self

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        for part in self._parts:
            yield part

    def cancel(self) -> None:
        self.cancelled += 1

    def broadcast(self, method: str) -> "FakeHandle":
        assert method == "metrics"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        if isinstance(self._metrics, Exception):
            raise self._metrics
        return self._metrics


def _module(name: str, **content: Any) -> Any:
    module = ModuleType(name)
    vars(module).update(content)
    return module
