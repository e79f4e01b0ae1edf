"""Serve the operators' routes, which change a running engine: sleep, new weights, another drafter.

`OperatorRoute` checks the operator's key before a body is read. Requests pause during a change; no stream ends.
"""

import asyncio
import os
from typing import TYPE_CHECKING

from fastapi import APIRouter
from pydantic import BaseModel, StrictBool, model_validator
from starlette.routing import BaseRoute

from redrafter.errors import CacheFullError, ReDrafterError
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.engine_process.messages import EngineError
from redrafter.serve.extension import Respond
from redrafter.serve.network.guards import OperatorRoute
from redrafter.serve.protocol.fields import Strict
from redrafter.serve.protocol.requests import ApiError

if TYPE_CHECKING:
    from redrafter.serve.server import Server


class NoFields(Strict):
    """A request without fields."""


class WeightsRequest(Strict):
    """New weights: a directory that `save_pretrained` wrote on the server's machine, or a .safetensors file.

    Those with NaN or infinite values, as after diverged training, are refused unless `allow_not_finite`.
    """

    path: str
    allow_not_finite: StrictBool = False


class DrafterRequest(Strict):
    """Another drafter: a directory on the server's machine, or the one that was active before the last change."""

    path: str | None = None
    previous: StrictBool = False

    @model_validator(mode="after")
    def _check_one(self) -> "DrafterRequest":
        if (self.path is None) != self.previous:
            raise ValueError('give a path, or "previous": true, and not both')
        return self


class EngineState(BaseModel):
    """Current state of everything that an operator may change.

    `drafter` and `previous_drafter` are directories given by an operator; null for the drafter that the server started
    with. `drafter_number` counts the changes, and labels the drafts in `/metrics`.
    """

    asleep: bool
    drafter: str | None
    previous_drafter: str | None
    drafter_number: int


class ChangedEngine(EngineState):
    """State of the engine after a change.

    `not_finite` lists tensors that were written with NaN or infinite values: sequences that need these values end with
    an error.
    """

    not_finite: list[str]


class OperatedEngine:
    """Applies operators' changes to the engine, one at a time."""

    def __init__(self, server: "Server"):
        """Start with the drafter that the server was started with."""
        self._server, self._turn = server, asyncio.Lock()
        self._drafter: str | None = None
        self._previous: str | None = None

    @property
    def state(self) -> EngineState:
        """The last reported state of the engine."""
        load = self._server.engine.load
        return EngineState(
            asleep=load.asleep, drafter=self._drafter, previous_drafter=self._previous, drafter_number=load.drafter
        )

    async def change(self, kind: str, path: str | None = None) -> ChangedEngine:
        """Apply a change to the engine, and return the state after it; raise `ApiError` if it is rejected."""
        of_drafter = kind == "change_drafter"
        # Both are false for any invalid name, including one with NUL.
        if path is not None and not await asyncio.to_thread(os.path.isdir if of_drafter else os.path.exists, path):
            what = "directory" if of_drafter else "directory or file"
            raise ApiError(404, f"there is no {what} {path!r} on the server's machine", "path")
        # Changes are made one after the other, so that the recorded state is the engine's.
        async with self._turn:
            try:
                not_finite = await self._server.engine.change_engine(kind, path)
            except (Stopped, EngineError):
                raise
            except CacheFullError as error:
                raise ApiError(503, str(error)) from error
            except ReDrafterError as error:
                raise ApiError(400, str(error), None if path is None else "path") from error
            # Without a path the engine returns to the previous drafter.
            if of_drafter:
                self._drafter, self._previous = (self._previous if path is None else path), self._drafter
        return ChangedEngine(**self.state.model_dump(), not_finite=list(not_finite))


def rollout_routes(server: "Server", respond: Respond) -> list[BaseRoute]:
    """Return the routes; all of them require an operator's key."""
    operated, routes = OperatedEngine(server), APIRouter(route_class=OperatorRoute)

    @routes.post("/v1/sleep")
    async def sleep(body: NoFields | None = None) -> EngineState:
        return await operated.change("sleep")

    @routes.post("/v1/wake")
    async def wake(body: NoFields | None = None) -> EngineState:
        return await operated.change("wake")

    @routes.post("/v1/update_weights")
    async def update_weights(body: WeightsRequest) -> ChangedEngine:
        kind = "update_weights_not_finite" if body.allow_not_finite else "update_weights"
        return await operated.change(kind, body.path)

    @routes.post("/v1/drafter")
    async def change_drafter(body: DrafterRequest) -> ChangedEngine:
        return await operated.change("change_drafter", body.path)

    @routes.get("/v1/drafter")
    async def drafter() -> EngineState:
        return operated.state

    return routes.routes
