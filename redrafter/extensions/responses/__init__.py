"""Serve OpenAI's Responses protocol."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redrafter.serve.extension import Extension, Respond

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from redrafter.serve.server import Server


class ResponsesExtension(Extension):
    """Adds `/v1/responses`."""

    writing_paths = ("/v1/responses",)

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the route, which is for clients."""
        from redrafter.extensions.responses.routes import responses_routes

        return responses_routes(server, respond)


EXTENSION = ResponsesExtension()
