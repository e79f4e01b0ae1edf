"""Replaces Ray where it is not installed, so that our calls of it are tested there too."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

REPLICA = "redrafter.extensions.replicas.replica"  # it imports Ray


@dataclass
class Deployment:
    """A class with its configuration, and the arguments of its constructor."""

    replica: type
    config: dict[str, Any]
    arguments: tuple[Any, ...] = ()

    def bind(self, *arguments: Any) -> "Deployment":
        self.arguments = arguments
        return self


@dataclass
class FakeRay:
    """A cluster with resources; `run` is called when an application is deployed, and `metrics` are its replicas'."""

    run: Any = None
    resources: dict[str, float] = field(default_factory=dict)
    message: str = ""  # of the deployment
    metrics: Iterable[Any] = ()
    calls: list[str] = field(default_factory=list)
    init_error: Exception | None = None

    def install(self, patch: pytest.MonkeyPatch) -> "FakeRay":
        """Make `import ray` return this object's functions."""
        serve, ray = ModuleType("ray.serve"), ModuleType("ray")
        context = SimpleNamespace(
            replica_id=SimpleNamespace(unique_id="r1"), deployment="Replica", app_name="redrafter"
        )
        serve.__dict__.update(
            deployment=lambda replica, **config: Deployment(replica, config),
            ingress=lambda: lambda replica: replica,
            get_replica_context=lambda: context,
            get_deployment_handle=lambda deployment, app: self,
            status=lambda: SimpleNamespace(applications=self._applications()),
            run=self._run,
        )
        for name in ("start", "delete", "shutdown"):
            setattr(serve, name, lambda *_, _name=name, **__: self.calls.append(_name))
        ray.__dict__.update(serve=serve, init=self._init, cluster_resources=lambda: self.resources)
        ray.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # the module can be found
        for module in (ray, serve):
            patch.setitem(sys.modules, module.__name__, module)
        patch.delitem(sys.modules, REPLICA, raising=False)
        return self

    def _init(self, **_: Any) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.calls.append("init")

    def _run(self, application: Deployment, name: str, route_prefix: str) -> None:
        self.calls.append("run")
        if self.run is not None:
            self.run()

    def _applications(self) -> dict[str, Any]:
        if "delete" in self.calls:
            return {}
        return {"redrafter": SimpleNamespace(deployments={"Replica": SimpleNamespace(message=self.message)})}

    def broadcast(self, method: str) -> "FakeRay":
        assert method == "metrics"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return list(self.metrics)
