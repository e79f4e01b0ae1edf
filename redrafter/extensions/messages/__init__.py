"""Serve Anthropic's Messages protocol to its client library and to coding agents."""

from typing import TYPE_CHECKING, Any

from redrafter.serve.extension import Extension

if TYPE_CHECKING:
    from redrafter.serve.protocol.requests import ApiError


MESSAGES_PATH = "/v1/messages"


class MessagesExtension(Extension):
    """Adds `/v1/messages` and `/v1/messages/count_tokens`, for clients, with errors in Anthropic's format."""

    protocol_path = MESSAGES_PATH
    writing_paths = (MESSAGES_PATH,)
    key_header = "X-Api-Key"
    cors_headers = ("Anthropic-Version", "Anthropic-Beta")
    route_maker = f"{__name__}.routes:messages_routes"

    def format_error(self, error: "ApiError") -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an error in Anthropic's format."""
        from redrafter.extensions.messages.protocol import messages_error

        return messages_error(error)


EXTENSION = MessagesExtension()
