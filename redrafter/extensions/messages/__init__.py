"""Serve Anthropic's Messages protocol to its client library and to coding agents."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redrafter.extensions.messages.names import MESSAGES_PATH
from redrafter.serve.extension import Extension, Respond

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from redrafter.serve.protocol.requests import ApiError
    from redrafter.serve.server import Server


class MessagesExtension(Extension):
    """Adds `/v1/messages` and `/v1/messages/count_tokens`, with errors in Anthropic's format."""

    protocol_path = MESSAGES_PATH
    writing_paths = (MESSAGES_PATH,)
    key_header = "X-Api-Key"
    cors_headers = ("Anthropic-Version", "Anthropic-Beta")

    def routes(self, server: "Server", respond: Respond) -> "Sequence[BaseRoute]":
        """Return the routes, which are for clients."""
        from redrafter.extensions.messages.routes import messages_routes

        return messages_routes(server, respond)

    def format_error(self, error: "ApiError") -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an error in Anthropic's format."""
        from redrafter.extensions.messages.protocol import messages_error

        return messages_error(error)


EXTENSION = MessagesExtension()
