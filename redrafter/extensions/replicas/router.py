"""Implement the application that clients reach: it forwards each request to a replica, and retries if that is lost.

A request goes to the replica that has read the beginning of its prompt, unless that replica is busy. Requests of one
session, and prompts with the same beginning, have the same key. A hash of key and replica orders the replicas for each
key (rendezvous hashing), and all routers compute the same order; adding or removing a replica affects only the keys
that rank it first. A request goes to the first replica in its key's order that is not full (consistent hashing with
bounded loads, https://arxiv.org/abs/1608.01350).
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrafter.extensions.replicas.exchange import AnswerPart, AnswerStart, HttpCall
from redrafter.serve.extension import extensions, protocol_at, writing_paths
from redrafter.serve.network.guards import HEALTH_PATHS, AccessPolicy, JsonRequest, add_guards, error_answer
from redrafter.serve.protocol.requests import ApiError

SESSION_HEADER = b"x-session-id"  # the name that Ray Serve uses
KEY_CHARACTERS = 256  # of a prompt's beginning: about four KV blocks
KEY_TOKENS = 64
SHARE_ABOVE_MEAN = 1.25  # limit of a replica's requests, relative to the mean
PROMPT_FIELDS = ("prompt", "system", "messages", "instructions", "input")  # of completions, messages, chats, responses
SYSTEM_ROLES = ("system", "developer")
_DONE = b"[DONE]"
# Fields that add per-token data to a stream. A resumed stream may split its text differently, so they cannot be merged.
_TOLD_BY_TOKEN = ("logprobs", "tools", "prompt_logprobs")
_CHANNELS = ("text", "content", "reasoning_content")
_LOG = logging.getLogger(__name__)
MAX_RETRIES = 2  # for lost replicas; a limit, since a request that crashes engines would crash them all
HEALTH_SECONDS = 5.0  # time limit for any replica to answer
SEED_BITS = 61
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Ask = Callable[[HttpCall], AsyncGenerator[AnswerPart, None]]


def routing_key(session: bytes | None, document: Mapping[str, Any]) -> str | None:
    """Return the key of a request: its session, or the beginning of its prompt; None without a prompt.

    `session` is the value of `SESSION_HEADER`, if sent; `document` is the body, which is not validated yet.
    """
    if session:
        return "session " + session.decode("latin-1")
    prompt = next((document[name] for name in PROMPT_FIELDS if document.get(name)), None)
    if prompt is None:
        return None
    named = (document.get(name) for name in ("model", "cache_salt"))
    return json.dumps([*(name if isinstance(name, str) else None for name in named), _beginning(prompt)])


def rank_replicas(key: str, loads: Mapping[str, int], target: float) -> list[str]:
    """Return all replicas' names, best first for a key: replicas that are not full, then the least loaded.

    `loads` are the replicas' numbers of requests; each may have `target`, regardless of the mean load.
    """
    order = sorted(loads, key=lambda name: hashlib.sha256(f"{name} {key}".encode()).digest())
    limit = max(target, math.ceil(SHARE_ABOVE_MEAN * (sum(loads.values()) + 1) / max(len(loads), 1)))
    free = [name for name in order if loads[name] < limit]
    full = [name for name in order if loads[name] >= limit]
    return free + sorted(full, key=lambda name: loads[name])


def _beginning(prompt: Any) -> str:
    """Return the beginning of a prompt: a string, token ids, messages, or a list of prompts, whose first is used."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:KEY_CHARACTERS]
    if not isinstance(prompt, list):
        return ""
    messages = [part for part in prompt if isinstance(part, dict)]
    if not messages:
        return " ".join(str(token) for token in prompt[:KEY_TOKENS] if isinstance(token, int))
    system = (message for message in messages if message.get("role") in SYSTEM_ROLES)
    # Conversations with the same system message share its cached prefix.
    first = next(system, messages[0])
    content = first.get("content", messages)  # content of a message; a list of blocks is used directly
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    # Marks that differ in each request would send equal prompts to different replicas.
    ignored = tuple(mark for extension in extensions() for mark in extension.ignored_marks)
    told = (text for text in texts if isinstance(text, str) and not text.startswith(ignored))
    return " ".join(told)[:KEY_CHARACTERS]


class DivergedError(Exception):
    """Raised when the output of a second replica differs from the first one's."""


def can_resume(path: str, document: Mapping[str, Any]) -> bool:
    """Return whether another replica can resume a partial stream. `document` is the request's body.

    The replica generates the whole output again, and the client receives the part that it lacks.
    """
    options = document.get("stream_options")
    drafts = isinstance(options, dict) and options.get("include_drafts")
    fields = (document.get(name) for name in _TOLD_BY_TOKEN)
    told = any(field is not None and field is not False for field in fields)  # 0 asks for log-probabilities too
    return path in ("/v1/completions", "/v1/chat/completions") and not told and not drafts


class SentStream:
    """The events of a completion or chat stream that a client has received."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._resumed = False
        self._left: dict[tuple[int, str], str] = {}  # text still to be skipped, by choice and channel
        self._finished: set[int] = set()
        self._head: dict[str, Any] = {}
        self._had_usage = False

    def resume(self) -> None:
        """Prepare to receive the same stream again from its beginning."""
        self._resumed, self._left = bool(self._sent), {}
        for data in _split(b"".join(self._sent)):
            event = json.loads(data)
            self._head = self._head or {name: event[name] for name in ("id", "created")}
            self._had_usage |= not event["choices"]
            for choice in event["choices"]:
                index, delta = choice["index"], _delta(choice)
                for channel in _CHANNELS:
                    key = (index, channel)
                    self._left[key] = self._left.get(key, "") + (delta.get(channel) or "")
                if choice["finish_reason"] is not None:
                    self._finished.add(index)
        self._opened = {index for index, _ in self._left}

    def push(self, events: bytes) -> bytes:
        """Return the replica's events without the parts that the client already has.

        Raises:
            DivergedError: The text differs from the part that the client already has.
        """
        new = self._cut(events) if self._resumed else events
        if new:
            self._sent.append(new)
        return new

    def _cut(self, events: bytes) -> bytes:
        kept = []
        for data in _split(events):
            event = json.loads(data)
            if "choices" in event and (event := self._cut_event(event)) is None:
                continue
            kept.append(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
        if events.endswith(b"data: " + _DONE + b"\n\n"):
            kept.append(b"data: " + _DONE + b"\n\n")
        return b"".join(kept)

    def _cut_event(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if not event["choices"]:
            return None if self._had_usage else event | self._head
        choices = [choice for choice in event["choices"] if self._cut_choice(choice)]
        return event | self._head | {"choices": choices} if choices else None

    def _cut_choice(self, choice: dict[str, Any]) -> bool:
        """Remove the text that the client has from a choice, and return whether anything remains."""
        index, delta = choice["index"], _delta(choice)
        if index in self._opened:
            delta.pop("role", None)
        for channel in _CHANNELS:
            if delta.get(channel):
                delta[channel] = self._cut_text((index, channel), delta[channel])
        finish = choice["finish_reason"] is not None
        # The new replica ended before it repeated all that was sent, so it wrote another text.
        if finish and any(self._left.get((index, channel)) for channel in _CHANNELS):
            raise DivergedError
        lacked = finish and index not in self._finished
        return lacked or index not in self._opened or any(delta.get(channel) for channel in _CHANNELS)

    def _cut_text(self, key: tuple[int, str], text: str) -> str:
        expected = self._left.get(key, "")
        count = min(len(expected), len(text))
        if expected[:count] != text[:count]:
            raise DivergedError
        self._left[key] = expected[count:]
        return text[count:]


def _split(events: bytes) -> list[bytes]:
    """Split complete events and return their data, except for the end mark of a stream."""
    data = (event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event)
    return [document for document in data if document != _DONE]


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the object with a choice's text: the delta of a chat, or the choice itself for completions."""
    delta: dict[str, Any] = choice.get("delta", choice)
    return delta


def create_router(
    ask: Ask,
    metrics: Callable[[], Awaitable[bytes]],
    lost: tuple[type[Exception], ...],
    policy: AccessPolicy,
    max_body_bytes: int,
) -> ASGIApp:
    """Return the router's ASGI application, protected by `add_guards`.

    `ask` sends a request to the replica of its key and yields the answer, or raises an error in `lost` if the replica
    ends first. `metrics` returns the metrics of all replicas.
    """

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            if scope["path"] == "/metrics" and scope["method"] == "GET":
                return await Response(await metrics(), media_type=METRICS_TYPE)(scope, receive, send)
            body, document = await _read(scope)
        except ApiError as error:
            return await error_answer(error, scope["path"])(scope, receive, send)
        # Requests with equal keys go to one replica, whose cache has their prefix.
        key = routing_key(dict(scope["headers"]).get(SESSION_HEADER), document)
        call = HttpCall.from_scope(scope, body, key, scope["facts"]["id"])
        answering = _Answer(call, can_resume(scope["path"], document), send).relay(ask, lost)
        if scope["path"] not in HEALTH_PATHS:
            return await answering
        try:
            await asyncio.wait_for(answering, HEALTH_SECONDS)
        except asyncio.TimeoutError:
            await Response(status_code=503)(scope, receive, send)

    app = Starlette(routes=[Mount("/", route)])
    add_guards(app, policy, max_body_bytes)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:  # Ray's proxy adds the request id header itself
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return answer


async def _read(scope: Scope) -> tuple[bytes, Mapping[str, Any]]:
    """Return the body to forward to replicas, and its parsed value, which is empty unless it is a JSON object.

    A generation request without a seed gets one, so that every replica generates the same output.
    """
    request: JsonRequest = scope["request"]
    body = await request.body()
    if scope["method"] != "POST":
        return body, {}
    try:
        document = await request.json()
    except json.JSONDecodeError:  # the replica reports the error
        return body, {}
    if not isinstance(document, dict):
        return body, {}
    if scope["path"] in writing_paths() and document.get("seed") is None:
        document["seed"] = secrets.randbits(SEED_BITS)
        body = json.dumps(document).encode()
    return body, document


class _Answer:
    def __init__(self, call: HttpCall, resumable: bool, send: Send):
        self._call, self._send = call, send
        self._stream = SentStream() if resumable else None
        self._begun = False  # whether the client has received the status

    async def relay(self, ask: Ask, lost: tuple[type[Exception], ...]) -> None:
        """Send a replica's answer; if the replica is lost, send the rest from another one."""
        for attempt in range(MAX_RETRIES + 1):
            try:
                return await self._relay_once(ask)
            except DivergedError:
                _LOG.warning(
                    "a lost replica's text goes on otherwise on another one: --batch-invariant makes them alike"
                )
                return await self._fail(
                    "the replica that wrote this text was lost, and another one writes another text"
                )
            except lost as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                _LOG.warning("a replica was lost while it answered %s: %s", self._call.scope["path"], reason)
                # Without a stream to compare with, an answer that was partly sent cannot be continued.
                if attempt == MAX_RETRIES or (self._begun and self._stream is None):
                    return await self._fail("the replica that wrote this answer was lost: send the request again")
                if self._stream is not None:
                    self._stream.resume()

    async def _relay_once(self, ask: Ask) -> None:
        """Send the answer of one replica: a stream event by event, another answer once it is complete."""
        start, whole, streaming = AnswerStart(500, []), [], False
        async with contextlib.aclosing(ask(self._call)) as parts:
            async for part in parts:
                if part.start is not None:
                    start = part.start
                    types = (value for name, value in start.headers if name.lower() == b"content-type")
                    streaming = any(value.startswith(b"text/event-stream") for value in types)
                if not streaming:
                    # An answer that is no stream is sent only when complete, so that another replica can still give it.
                    whole.append(part.body)
                elif body := part.body if self._stream is None else self._stream.push(part.body):
                    await self._send_start(start)
                    await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if not streaming and self._begun:
            return await self._fail("the replica that wrote this text was lost, and no other one takes it on now")
        await self._send_start(start)
        await self._send({"type": "http.response.body", "body": b"".join(whole)})

    async def _send_start(self, start: AnswerStart) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": start.status, "headers": start.headers})

    async def _fail(self, message: str) -> None:
        path = self._call.scope["path"]
        answer = error_answer(ApiError(503, message, headers={"Retry-After": "1"}), path)
        body = bytes(answer.body)
        if self._begun:
            event = None if (protocol := protocol_at(path)) is None else protocol.error_event
            body = (b"" if event is None else f"event: {event}\n".encode()) + b"data: " + body + b"\n\n"
        await self._send_start(AnswerStart(answer.status_code, answer.raw_headers))
        await self._send({"type": "http.response.body", "body": body})
