"""Serve OpenAI's Responses protocol."""

from redrafter.serve.extension import Extension


class ResponsesExtension(Extension):
    """Adds `/v1/responses`, for clients."""

    writing_paths = ("/v1/responses",)
    route_maker = f"{__name__}.routes:responses_routes"


EXTENSION = ResponsesExtension()
