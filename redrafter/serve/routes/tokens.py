"""vLLM's routes: `/tokenize` and `/detokenize`, `/v1/models/{id}`, `/version`, and those that change adapters."""

import asyncio
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field, StrictBool, model_validator

from redrafter.engine.detokenizer import decode_tokens
from redrafter.sandbox.process import SandboxedProcess
from redrafter.serve.prompts import Prompts
from redrafter.serve.protocol.answers import Model, error_responses
from redrafter.serve.protocol.fields import MAX_PARTS, Ids, Strict
from redrafter.serve.protocol.requests import MAX_TOOLS, ApiError, ChatRequest, Message, Tool
from redrafter.serve.service import Service
from redrafter.version import __version__

MAX_CONTEXTS = 8  # times the context length that a prompt may have to be tokenized
_CLOSED = "adapters are not changed while this server runs: start it with --allow-runtime-lora-updating"


class TokenizeRequest(Strict):
    """A prompt, or messages that the chat template writes as one.

    `add_special_tokens` is for a prompt, by default as for a completion; a template writes its own.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, and not both")
        if self.messages is None and self.tools is not None:
            raise ValueError("tools are for messages")
        return self


class TokenizeAnswer(BaseModel):
    """The tokens of a prompt. `token_strs` is null unless `return_token_strs` asks for it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Strict):
    """Tokens to write as text."""

    model: str | None = None
    tokens: Ids


class DetokenizeAnswer(BaseModel):
    """The text of some tokens."""

    prompt: str


class Version(BaseModel):
    """The version of the server."""

    version: str


def add_token_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for tokens, for one model, and for the version."""
    options: dict[str, Any] = {"responses": error_responses(400, 401, 404, 408, 413, 422)}

    @cache
    def prompts() -> Prompts:
        """Return a reader of prompts that are only tokenized, which may be longer than the context."""
        return replace(service.prompts, context=MAX_CONTEXTS * service.context)

    def encode(body: TokenizeRequest, decoder: SandboxedProcess | None) -> list[int]:
        """Return the tokens that a completion or a chat would read."""
        if body.messages is not None:
            generation = body.add_generation_prompt
            chat = ChatRequest(messages=body.messages, tools=body.tools, add_generation_prompt=generation)
            return prompts().encode_chat(chat, decoder).ids
        assert body.prompt is not None
        if body.add_special_tokens is None:
            [ids] = prompts().encode_prompts(body.prompt)
            return ids
        return prompts().encode_text(body.prompt, add_special_tokens=body.add_special_tokens)

    @app.get("/version", response_model=Version)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models/{model:path}", response_model=Model, responses=error_responses(401, 404))
    async def model(model: str) -> dict[str, Any]:
        service.check_model(model)
        return service.model_entry(model)

    @app.post("/tokenize", response_model=TokenizeAnswer, **options)
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        service.check_model(body.model)
        ids = await service.encode(encode, body, body.messages, request.scope["facts"])
        names = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": names}

    @app.post("/detokenize", response_model=DetokenizeAnswer, **options)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        vocabulary = service.engine.facts.vocab_size
        if (bad := next((token for token in body.tokens if token >= vocabulary), None)) is not None:
            raise ApiError(400, f"token id {bad} is out of range: there are {vocabulary} ids", "tokens")
        if len(body.tokens) > MAX_CONTEXTS * service.context:
            raise ApiError(400, f"{len(body.tokens)} tokens; at most {MAX_CONTEXTS * service.context}", "tokens")
        return {"prompt": await asyncio.to_thread(decode_tokens, service.tokenizer, body.tokens)}


class LoadAdapterRequest(Strict):
    """An adapter to load: its name, and the directory on the server's machine that PEFT wrote."""

    lora_name: str | None = None
    lora_path: str | None = None


class UnloadAdapterRequest(Strict):
    """The adapter to unload."""

    lora_name: str | None = None


def add_adapter_routes(app: FastAPI, service: Service, allowed: bool) -> None:
    """Add the routes, which do nothing but refuse where adapters may not be changed."""
    options: dict[str, Any] = {"response_class": PlainTextResponse}
    options["responses"] = error_responses(400, 401, 404, 408, 413, 422, 503)

    def check_allowed() -> None:
        if not allowed:
            raise ApiError(404, _CLOSED, code="unsupported_endpoint")

    @app.post("/v1/load_lora_adapter", **options)
    async def load(body: LoadAdapterRequest) -> PlainTextResponse:
        check_allowed()
        if not body.lora_name or not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_user_input")
        await service.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", **options)
    async def unload(body: UnloadAdapterRequest) -> PlainTextResponse:
        check_allowed()
        if not body.lora_name:
            raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", code="invalid_user_input")
        await service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
