"""Build the ASGI application: routes of OpenAI and extensions, health, metrics, and pages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import Field, StrictBool, model_validator
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import ArgumentError, ReDrafterError, UnsupportedError
from redrafter.sandbox.process import SandboxedProcess
from redrafter.scheduler.request import check_token_ids
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.config import ServeOptions
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.extension import extensions, writing_paths
from redrafter.serve.network.guards import AccessPolicy, JsonRoute, add_guards, error_answer
from redrafter.serve.protocol import requests
from redrafter.serve.protocol.fields import Ids, Parts, Strict, field_path
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.routes.page import page
from redrafter.serve.routes.translated import chat_request
from redrafter.version import __version__

if TYPE_CHECKING:
    from redrafter.serve.server import Server

_LOG = logging.getLogger(__name__)
MAX_PATH_CHARACTERS = 200  # in the message of an error


def server_app(server: "Server") -> FastAPI:
    """Return the ASGI application of a server, with its access policy, limits and traces."""
    options = server.options
    policy = AccessPolicy.from_options(server.keys, options, server.operators)
    app = create_app(server, policy, options.max_body_size, options.allow_runtime_lora_updating)
    if server.traces is not None:
        server.traces.instrument(app)
    return app


def create_app(
    server: "Server",
    policy: AccessPolicy | None = None,
    max_body_bytes: int = ServeOptions.max_body_size,
    allow_lora_updating: bool = ServeOptions.allow_runtime_lora_updating,
) -> FastAPI:
    """Return the ASGI application, which accepts all requests unless a policy is given."""
    policy = policy or AccessPolicy()
    # Disable FastAPI's built-in routes, which would not check the caller.
    app = FastAPI(title="redrafter", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    add_guards(app, policy, max_body_bytes)
    _handle_errors(app)

    chat_page, docs_page, locked_docs_page = page("page.html"), page("docs.html"), page("docs.html", 401)

    @cache
    def schema_text() -> bytes:
        document = app.openapi()
        for operation in (each for path in document["paths"].values() for each in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's status of wrong fields; this server's is 400
        return to_json(document)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return chat_page

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return docs_page if request.scope["admitted"] else locked_docs_page  # the locked page prompts for the key

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> Response:
        return Response(schema_text(), media_type="application/json")

    @app.get("/health")
    @app.get("/v1/health/live")
    async def health() -> Response:
        return Response(status_code=200 if server.engine.healthy else 503)

    @app.get("/v1/health/ready")
    async def ready() -> Response:
        return Response(status_code=200 if server.engine.healthy and not server.engine.load.asleep else 503)

    @app.get("/v1/health/model")
    async def model_health() -> dict[str, Any]:
        if not server.engine.healthy:
            raise ApiError(503, "the engine does not respond" if server.engine.alive else "the server is stopping")
        return {"model": server.model, "running": server.engine.load.running}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": server.model_entries}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/completions")
    async def completions(body: requests.CompletionRequest, request: Request) -> Response:
        return await respond(server.completion(body, request.scope["facts"]), request)

    @app.post("/v1/chat/completions")
    async def chat(body: requests.ChatRequest, request: Request) -> Response:
        return await respond(server.chat(body, request.scope["facts"]), request)

    add_token_routes(app, server)
    add_adapter_routes(app, server, allow_lora_updating)
    add_extension_routes(app, server)
    return app


def add_extension_routes(app: FastAPI, server: "Server") -> None:
    """Add the routes of extensions.

    Raises `ArgumentError` for a route that does not check its caller, and for a duplicate path.
    """
    for extension in extensions():
        for route in extension.routes(server, respond):
            if not isinstance(route, JsonRoute):
                raise ArgumentError(
                    f"{type(extension).__name__} has the route {getattr(route, 'path', route)!r} that does not check "
                    "who calls: make it with APIRouter(route_class=JsonRoute), or OperatorRoute"
                )
            others = (other for other in app.routes if isinstance(other, JsonRoute) and other.path == route.path)
            if any(set(other.methods or ()) & set(route.methods or ()) for other in others):
                message = f"{type(extension).__name__} has the route {route.path!r}, which the server has already"
                raise ArgumentError(message)
            app.routes.append(route)  # appended directly: some versions of FastAPI wrap or copy it in `include_router`


async def respond(
    work: Awaitable[dict[str, Any] | AsyncIterator[dict[str, Any]]],
    request: Request,
    events: Callable[[AsyncIterator[dict[str, Any]]], AsyncIterator[bytes]] | None = None,
) -> Response:
    """Return the response to a request, or status 499 if the client disconnects before it is ready.

    `work` computes the answer, or the parts of a stream, which `events` formats as server-sent events; None formats
    them as OpenAI's completions.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    # A client that leaves before its answer must free its slots, so the disconnect is awaited too.
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


async def _events(parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield _event(part)
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(requests.error_body(error.status, str(error), error.param, error.code))
    finally:
        await parts.aclose()  # type: ignore[attr-defined]


def _event(part: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(part)  # in a sixth of the time of `json.dumps`


def _handle_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return error_answer(_api_error(error, request), request.scope["path"])

    for kind in (ReDrafterError, Stopped, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def _api_error(error: Exception, request: Request) -> ApiError:
    """Convert an exception to the error for the client, and log the details that it omits."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code == 404:
        what = f"{request.scope['path'][:MAX_PATH_CHARACTERS]!r} is not served: use {', '.join(writing_paths())}"
        return ApiError(404, what, code="unsupported_endpoint")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _refused_field(error)
    for kind, status, headers in (
        (ArgumentError, 400, None),
        (QueueFullError, 429, {"Retry-After": "1"}),
        (Stopped, 503, {"Retry-After": "5"}),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), headers=headers)
    if isinstance(error, UnsupportedError):  # log the hint for the operator
        _LOG.error("a request needs what is not there: %s", error)
        return ApiError(501, "this server cannot do what the request asks for", None, "not_implemented")
    if isinstance(error, ReDrafterError):
        _LOG.error("a request failed: %s", error)
        return ApiError(500, str(error))
    # Only the log has the message of an unexpected error. The layer that adds this header is already unwound.
    request_id = request.scope.get("facts", {}).get("id", "")
    what = f"the server failed on this request; its log has the reason under the id {request_id}"
    return ApiError(500, what, headers={"X-Request-Id": request_id})


def _refused_field(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind, param, message = first["type"], field_path(first), first["msg"].removeprefix("Value error, ")
    if kind in ("extra_forbidden", "unsupported"):
        advice = f": {message}" if kind == "unsupported" else ""
        return ApiError(400, f"{param} is not supported{advice}", param, "unsupported_parameter")
    return ApiError(400, f"{param}: {message}" if param else message, param)


_ADAPTERS_CLOSED = "adapters are not changed while this server runs: start it with --allow-runtime-lora-updating"


class TokenizeRequest(Strict):
    """A prompt to tokenize, or messages to render with the chat template.

    `add_special_tokens` applies to prompts, and defaults to completions' behaviour; templates write special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Parts[requests.Message], Field(min_length=1)] | None = None
    tools: Annotated[list[requests.Tool], Field(fail_fast=True, max_length=requests.MAX_TOOLS)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, and not both")
        for name in ("tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise ValueError(f"{name} are for messages")
        return self


class DetokenizeRequest(Strict):
    """Tokens to write as text."""

    model: str | None = None
    tokens: Ids


def add_token_routes(app: FastAPI, server: "Server") -> None:
    """Add the routes for tokenization, for a single model, and for the version."""

    def encode(body: TokenizeRequest, decoder: SandboxedProcess | None) -> list[int]:
        """Return the prompt tokens of an equivalent completion or chat."""
        if body.messages is not None:
            fields = ("messages", "tools", "add_generation_prompt", "chat_template_kwargs")
            chat = chat_request({name: getattr(body, name) for name in fields})
            return server.counting_prompts.encode_chat(chat, decoder).ids
        assert body.prompt is not None
        [ids] = server.counting_prompts.encode_prompts(body.prompt, body.add_special_tokens)
        return ids

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        server.check_model(model)
        return server.model_entry(model)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        server.check_model(body.model)
        ids = await server.encode(partial(encode, body), body.messages, request.scope["facts"])

        def written() -> bytes:
            names = server.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            return to_json({"count": len(ids), "max_model_len": server.context, "tokens": ids, "token_strs": names})

        # In a thread, since an answer may have a million tokens.
        return Response(await asyncio.to_thread(written), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        server.check_model(body.model)
        with requests.blaming("tokens"):
            check_token_ids(body.tokens, server.engine.facts.bounds.vocab_size)
        if len(body.tokens) > (most := server.counting_prompts.bounds.max_seq_len):
            raise ApiError(400, f"{len(body.tokens)} tokens; at most {most}", "tokens")
        return {"prompt": await asyncio.to_thread(decode_tokens, server.tokenizer, body.tokens)}


class LoadAdapterRequest(Strict):
    """An adapter to load: its name, and its PEFT directory on the server's machine."""

    lora_name: str | None = None
    lora_path: str | None = None


class UnloadAdapterRequest(Strict):
    """The adapter to unload."""

    lora_name: str | None = None


def add_adapter_routes(app: FastAPI, server: "Server", allowed: bool) -> None:
    """Add the routes for adapters; if changes are not `allowed`, they only return errors."""

    def check_allowed() -> None:
        if not allowed:
            raise ApiError(404, _ADAPTERS_CLOSED, code="unsupported_endpoint")

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterRequest) -> PlainTextResponse:
        check_allowed()
        if not body.lora_name or not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_user_input")
        await server.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterRequest) -> PlainTextResponse:
        check_allowed()
        if not body.lora_name:
            raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", code="invalid_user_input")
        await server.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
