"""The ASGI application: OpenAI's routes, health, metrics, a page to try them on, and what is refused by name."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.scheduler.limits import QueueFullError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.network.guards import AccessPolicy, JsonRoute, Refusal, add_guards, error_answer
from redrafter.serve.protocol.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelHealth,
    Models,
    answer_responses,
    error_responses,
)
from redrafter.serve.protocol.fields import field_path
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest, error_body
from redrafter.serve.routes.page import page
from redrafter.serve.routes.responses import add_responses
from redrafter.serve.routes.tokens import add_adapter_routes, add_token_routes
from redrafter.serve.service import Service
from redrafter.version import __version__

_LOG = logging.getLogger(__name__)
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


def create_app(
    service: Service,
    policy: AccessPolicy | None = None,
    max_body_bytes: int = ServeOptions.max_body_size,
    allow_lora_updating: bool = ServeOptions.allow_runtime_lora_updating,
) -> FastAPI:
    """Return the ASGI application, which accepts all requests unless a policy says which."""
    policy = policy or AccessPolicy()
    service.apart = len(policy.keys) > 1
    app = FastAPI(title="redrafter", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    add_guards(app, policy, max_body_bytes)
    _handle_errors(app)

    chat_page, docs_page, locked_docs_page = page("page.html"), page("docs.html"), page("docs.html", 401)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return chat_page

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return docs_page if request.scope["admitted"] else locked_docs_page  # a page that asks for the key

    stopping: dict[str, Any] = {
        "response_class": Response,
        "responses": {503: {"description": "the server is stopping"}},
    }

    @app.get("/health", **stopping)
    @app.get("/v1/health/ready", **stopping)
    @app.get("/v1/health/live", **stopping)
    async def health() -> Response:
        return Response(status_code=200 if service.engine.alive else 503)

    @app.get("/v1/health/model", response_model=ModelHealth, responses=error_responses(503))
    async def model_health() -> dict[str, Any]:
        if not service.engine.alive:
            raise ApiError(503, "the server is stopping")
        return {"model": service.model, "running": service.engine.load.running}

    @app.get("/v1/models", response_model=Models, responses=error_responses(401))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.model_entries}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/completions", responses=answer_responses(CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _respond(service.completion(body, request.scope["facts"]), request)

    @app.post("/v1/chat/completions", responses=answer_responses(ChatAnswer))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _respond(service.chat(body, request.scope["facts"]), request)

    add_token_routes(app, service)
    add_responses(app, service, _respond)
    add_adapter_routes(app, service, allow_lora_updating)
    for path, reason in _REFUSED.items():  # with all below them; clients do not retry after 404 in OpenAI's shape
        for route in (path, f"{path}/{{rest:path}}"):
            app.add_api_route(route, _refusal(reason), methods=["GET", "POST", "DELETE"], include_in_schema=False)
    return app


async def _respond(
    work: Awaitable[dict[str, Any] | AsyncIterator[dict[str, Any]]],
    request: Request,
    events: Callable[[AsyncIterator[dict[str, Any]]], AsyncIterator[str]] | None = None,
) -> Response:
    """Return the answer to a request, or status 499 if the client leaves before it is ready.

    `work` computes the answer, or the parts of a stream, which `events` writes as server-sent events: if None, as those
    of OpenAI's completions.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        answer = await task
    finally:
        for future in (task, watch):
            future.cancel()
    if isinstance(answer, dict):
        return JSONResponse(answer)
    return StreamingResponse(
        (events or _events)(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _events(parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for part in parts:
            yield _event(part)
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error_body(error.status, str(error), error.param, error.code))
    finally:
        await parts.aclose()  # type: ignore[attr-defined]


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"


def _handle_errors(app: FastAPI) -> None:
    def respond(
        status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> Response:
        return JSONResponse(error_body(status, message, param, code), status, headers)

    @app.exception_handler(ApiError)
    async def api(_: Request, error: ApiError) -> Response:
        return respond(error.status, str(error), error.param, error.code)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return error_answer(error)

    @app.exception_handler(UnsupportedError)
    async def unsupported(_: Request, error: UnsupportedError) -> Response:
        """Log what the operator could change, and answer that this server cannot do it."""
        _LOG.error("a request needs what is not there: %s", error)
        return respond(501, "this server cannot do what the request asks for", None, "not_implemented")

    for kind, status, headers in (
        (ArgumentError, 400, {}),
        (QueueFullError, 429, {"Retry-After": "1"}),
        (Stopped, 503, {"Retry-After": "5"}),
    ):

        @app.exception_handler(kind)
        async def told(
            _: Request, error: Exception, status: int = status, headers: dict[str, str] = headers
        ) -> Response:
            return respond(status, str(error), **headers)

    @app.exception_handler(ReDrafterError)
    async def failed(_: Request, error: ReDrafterError) -> Response:
        _LOG.error("a request failed: %s", error)
        return respond(500, str(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return respond(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(RecursionError)
    async def deep(_: Request, error: RecursionError) -> Response:
        return respond(400, "the body is nested too deeply")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        kind, param, message = first["type"], field_path(first), first["msg"].removeprefix("Value error, ")
        if kind == "json_invalid":
            return respond(400, f"the body is no JSON: {first.get('ctx', {}).get('error', message)}")
        if kind == "extra_forbidden":
            return respond(400, f"{param} is not supported", param, "unsupported_parameter")
        if kind == "unsupported":
            return respond(400, f"{param} is not supported: {message}", param, "unsupported_parameter")
        return respond(422, f"{param}: {message}" if param else message, param)


def _refusal(reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(404, reason, code="unsupported_endpoint")

    return refuse
