"""The application that clients talk to: it hands each request to a replica, and to another one if that is lost.

A request goes to the replica that has read the beginning of its prompt, unless that one is busy. Requests of one
session, and prompts that begin alike, have the same key. For each key the replicas have an order of their own, by a
hash of both (rendezvous hashing), which every router computes alike; a replica that comes or goes changes it only for
the keys that it is first for. A request goes to the first replica in the order of its key that is not full (consistent
hashing with bounded loads, https://arxiv.org/abs/1608.01350).
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
from redrafter.serve.extension import extensions, protocol_at
from redrafter.serve.network.guards import HEALTH_PATHS, AccessPolicy, JsonRequest, add_guards, error_answer
from redrafter.serve.protocol.requests import ApiError

SESSION_HEADER = b"x-session-id"  # as Ray Serve has it
KEY_CHARACTERS = 256  # of a prompt's beginning: some four blocks of keys and values
KEY_TOKENS = 64
SHARE_ABOVE_MEAN = 1.25  # of the mean number of requests per replica, that each may have
PROMPT_FIELDS = ("prompt", "system", "messages", "instructions", "input")  # of completions, messages, chats, responses
SYSTEM_ROLES = ("system", "developer")
_DONE = b"[DONE]"
# Fields that tell more of a stream's tokens than their text, which may come in other pieces the second time.
_TOLD_BY_TOKEN = ("logprobs", "tools", "prompt_logprobs")
_CHANNELS = ("text", "content", "reasoning_content")
_LOG = logging.getLogger(__name__)
WRITING_PATHS = ("/v1/completions", "/v1/chat/completions")  # with those of extensions
MAX_RETRIES = 2  # of a request whose replica is lost: more, and a request that ends engines would end all of them
HEALTH_SECONDS = 5.0  # in which some replica must answer
SEED_BITS = 61
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Ask = Callable[[HttpCall], AsyncGenerator[AnswerPart, None]]


def routing_key(session: bytes | None, document: Mapping[str, Any]) -> str | None:
    """Return the key of a request: its session, or how its prompt begins; None for a request without a prompt.

    `session` is the value of `SESSION_HEADER`, if it was sent; `document` the body, which nobody has checked yet.
    """
    if session:
        return "session " + session.decode("latin-1")
    prompt = next((document[name] for name in PROMPT_FIELDS if document.get(name)), None)
    if prompt is None:
        return None
    named = (document.get(name) for name in ("model", "cache_salt"))
    return json.dumps([*(name if isinstance(name, str) else None for name in named), _beginning(prompt)])


def rank_replicas(key: str, loads: Mapping[str, int], target: float) -> list[str]:
    """Return the names of all replicas, the best for a key first: those that are not full, then the least loaded.

    `loads` are the numbers of requests that replicas have; one may have `target`, however few the others have.
    """
    order = sorted(loads, key=lambda name: hashlib.sha256(f"{name} {key}".encode()).digest())
    limit = max(target, math.ceil(SHARE_ABOVE_MEAN * (sum(loads.values()) + 1) / max(len(loads), 1)))
    free = [name for name in order if loads[name] < limit]
    full = [name for name in order if loads[name] >= limit]
    return free + sorted(full, key=lambda name: loads[name])


def _beginning(prompt: Any) -> str:
    """Return how a prompt begins: a text, token ids, messages, or a list of prompts, of which the first counts."""
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
    first = next(system, messages[0])
    content = first.get("content", messages)  # of a message, or the list is a system prompt's blocks
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    ignored = tuple(mark for extension in extensions() for mark in extension.ignored_marks)
    told = (text for text in texts if isinstance(text, str) and not text.startswith(ignored))
    return " ".join(told)[:KEY_CHARACTERS]


class DivergedError(Exception):
    """The second text is not the first one."""


def can_resume(path: str, document: Mapping[str, Any]) -> bool:
    """Return whether another replica can continue a stream that has begun. document: body of its request.

    It writes the whole text again, and the client gets what it lacks.
    """
    options = document.get("stream_options")
    drafts = isinstance(options, dict) and options.get("include_drafts")
    fields = (document.get(name) for name in _TOLD_BY_TOKEN)
    told = any(field is not None and field is not False for field in fields)  # 0 asks for log-probabilities too
    return path in ("/v1/completions", "/v1/chat/completions") and not told and not drafts


class SentStream:
    """The events that a client has got of a stream of completions or of a chat."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._resumed = False
        self._left: dict[tuple[int, str], str] = {}  # text that is still to be left out, by choice and channel
        self._finished: set[int] = set()
        self._head: dict[str, Any] = {}
        self._had_usage = False

    def resume(self) -> None:
        """Expect the same stream from its beginning."""
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
        """Return those of a replica's events that the client lacks, whole or in part.

        Raises:
            DivergedError: The text is not the one that the client has the beginning of.
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
        """Cut off what the client has of a choice, and return whether anything is left that it lacks."""
        index, delta = choice["index"], _delta(choice)
        if index in self._opened:
            delta.pop("role", None)
        for channel in _CHANNELS:
            if delta.get(channel):
                delta[channel] = self._cut_text((index, channel), delta[channel])
        finish = choice["finish_reason"] is not None
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
    """Return the data of whole events but for the last one of a stream, which has none."""
    data = (event.removeprefix(b"data: ") for event in events.split(b"\n\n") if event)
    return [document for document in data if document != _DONE]


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    """Return where a choice has its text: a chat's in its delta, a completion's in the choice itself."""
    delta: dict[str, Any] = choice.get("delta", choice)
    return delta


def create_router(
    ask: Ask,
    metrics: Callable[[], Awaitable[bytes]],
    lost: tuple[type[Exception], ...],
    policy: AccessPolicy,
    max_body_bytes: int,
) -> ASGIApp:
    """Return the ASGI application, which `add_guards` guards.

    `ask` sends a request to the replica of its key and yields the answer, or raises an error of `lost` where that has
    ended before. `metrics` returns the metrics of all replicas.
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
        key = routing_key(dict(scope["headers"]).get(SESSION_HEADER), document)
        call = HttpCall.of(scope, body, key, scope["facts"]["id"])
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
        async def send_without(message: Message) -> None:  # Ray's proxy adds the header with a request's id anyway
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return answer


async def _read(scope: Scope) -> tuple[bytes, Mapping[str, Any]]:
    """Return the body of a request as replicas get it, and its value, which is empty where it is no JSON object.

    A request that writes gets a seed if it has none, so that every replica writes the same text.
    """
    request: JsonRequest = scope["request"]
    body = await request.body()
    if scope["method"] != "POST":
        return body, {}
    try:
        document = await request.json()
    except json.JSONDecodeError:  # the replica says so
        return body, {}
    if not isinstance(document, dict):
        return body, {}
    writing = (WRITING_PATHS, *(extension.writing_paths for extension in extensions()))
    if any(scope["path"] in paths for paths in writing) and document.get("seed") is None:
        document["seed"] = secrets.randbits(SEED_BITS)
        body = json.dumps(document).encode()
    return body, document


class _Answer:
    def __init__(self, call: HttpCall, resumable: bool, send: Send):
        self._call, self._send = call, send
        self._stream = SentStream() if resumable else None
        self._begun = False  # the client has got the status

    async def relay(self, ask: Ask, lost: tuple[type[Exception], ...]) -> None:
        """Send the answer of a replica, and what is missing of it from another one if that is lost."""
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
                if attempt == MAX_RETRIES or (self._begun and self._stream is None):
                    return await self._fail("the replica that wrote this answer was lost: send the request again")
                if self._stream is not None:
                    self._stream.resume()

    async def _relay_once(self, ask: Ask) -> None:
        """Send the answer of one replica: a stream as it comes, another answer when it is whole."""
        start, whole, streaming = AnswerStart(500, []), [], False
        async with contextlib.aclosing(ask(self._call)) as parts:
            async for part in parts:
                if part.start is not None:
                    start = part.start
                    types = (value for name, value in start.headers if name.lower() == b"content-type")
                    streaming = any(value.startswith(b"text/event-stream") for value in types)
                if not streaming:
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
