"""Serve OpenAI's Responses protocol."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from redrafter.serve.extension import NOTHING_STORED, Extension, Respond

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from redrafter.serve.server import Server


class ResponsesExtension(Extension):
    """Adds `/v1/responses`."""

    writing_paths = ("/v1/responses",)
    refused_paths = MappingProxyType(
        {
            "/v1/conversations": f"conversations are not served: {NOTHING_STORED}",
            "/v1/assistants": f"assistants are not served: use /v1/responses; {NOTHING_STORED}",
            "/v1/threads": f"threads are not served: use /v1/responses; {NOTHING_STORED}",
        }
    )

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the route, which is for clients."""
        from redrafter.extensions.responses.routes import responses_routes

        return responses_routes(server, respond)


EXTENSION = ResponsesExtension()
