"""Refusals of the routes of OpenAI's and Anthropic's protocols that are not served, with what is served instead."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI

from redrafter.serve.protocol.requests import ApiError

__all__ = ["add_refusals"]

_TEXT = "this server writes text alone: use /v1/chat/completions, /v1/responses or /v1/completions"
_STORED = "nothing is stored here: send all that belongs to a request with it"
_REFUSED = {
    "/v1/embeddings": "embeddings are not served: " + _TEXT,
    "/v1/messages": "Anthropic's protocol is not served: send the messages to /v1/chat/completions, in OpenAI's shape",
    "/v1/complete": "Anthropic's protocol is not served: send the prompt to /v1/completions",
    "/v1/audio": "audio is not served: " + _TEXT,
    "/v1/images": "images are not served: " + _TEXT,
    "/v1/videos": "videos are not served: " + _TEXT,
    "/v1/realtime": "the realtime protocol is not served: ask /v1/chat/completions with stream=true",
    "/v1/moderations": "moderations are not served: " + _TEXT,
    "/v1/files": "files are not served: " + _STORED,
    "/v1/uploads": "uploads are not served: " + _STORED,
    "/v1/vector_stores": "vector stores are not served: " + _STORED,
    "/v1/conversations": "conversations are not served: " + _STORED,
    "/v1/assistants": "assistants are not served: use /v1/responses; " + _STORED,
    "/v1/threads": "threads are not served: use /v1/responses; " + _STORED,
    "/v1/batches": "batches are not served: send the requests at once, as many as you like; they share their steps",
    "/v1/fine_tuning": "training is not served: redrafter train trains a drafter, on the command line",
    "/v1/rerank": "rerank is not served: " + _TEXT,
    "/v1/score": "scores of pairs are not served; for log-probabilities, /v1/completions with prompt_logprobs",
    "/pooling": "pooling is not served: " + _TEXT,
}
_METHODS = ["GET", "POST", "DELETE"]


def add_refusals(app: FastAPI) -> None:
    """Answer these routes and all below them with 404 in OpenAI's shape, after which clients do not retry."""
    for path, reason in _REFUSED.items():
        for route in (path, f"{path}/{{rest:path}}"):
            app.add_api_route(route, _refusal_handler(reason), methods=_METHODS, include_in_schema=False)


def _refusal_handler(reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(404, reason, code="unsupported_endpoint")

    return refuse
