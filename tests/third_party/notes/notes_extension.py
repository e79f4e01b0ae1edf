"""An extension of another package: clients write notes to the server, and an operator forgets them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrafter.serve.extension import Extension, Respond

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from redrafter.serve.server import Server


class NotesExtension(Extension):
    """Adds `/v1/notes`, and `/v1/notes/forget` for operators."""

    key_header = "X-Notes-Key"
    cors_headers = ("X-Notes-Version",)

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        from fastapi import APIRouter

        from redrafter.serve.network.guards import JsonRoute, OperatorRoute
        from redrafter.serve.protocol.fields import Strict

        class Note(Strict):
            text: str = ""

        notes: list[str] = []
        for_clients, for_operators = APIRouter(route_class=JsonRoute), APIRouter(route_class=OperatorRoute)

        @for_clients.post("/v1/notes")
        async def write(body: Note) -> list[str]:
            notes.append(body.text)
            return notes

        @for_operators.post("/v1/notes/forget")
        async def forget() -> None:
            notes.clear()

        return [*for_clients.routes, *for_operators.routes]


EXTENSION = NotesExtension()
