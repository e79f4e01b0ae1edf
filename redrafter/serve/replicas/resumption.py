"""A stream that another replica goes on with: it writes the whole text again, and its client gets what it lacks."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DivergedError", "SentStream", "can_resume"]

_DONE = b"[DONE]"
# Fields that tell more of a stream's tokens than their text, which may come in other pieces the second time.
_TOLD_BY_TOKEN = ("logprobs", "tools", "prompt_logprobs")
_CHANNELS = ("text", "content", "reasoning_content")


class DivergedError(Exception):
    """The second text is not the first one."""


def can_resume(path: str, document: Mapping[str, Any]) -> bool:
    """Return whether a stream can go on after it has begun. document: body of its request."""
    options = document.get("stream_options")
    drafts = isinstance(options, dict) and options.get("include_drafts")
    fields = (document.get(name) for name in _TOLD_BY_TOKEN)
    told = any(field is not None and field is not False for field in fields)  # 0 asks for log-probabilities too
    return path in ("/v1/completions", "/v1/chat/completions") and not told and not drafts


class SentStream:
    """The events that a client has got of a stream of completions or of a chat."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._resumption: _Resumption | None = None

    def resume(self) -> None:
        """Expect the same stream from its beginning."""
        self._resumption = _Resumption(b"".join(self._sent)) if self._sent else None

    def push(self, events: bytes) -> bytes:
        """Return those of a replica's events that the client lacks, whole or in part.

        Raises:
            DivergedError: The text is not the one that the client has the beginning of.
        """
        new = events if self._resumption is None else self._resumption.push(events)
        if new:
            self._sent.append(new)
        return new


class _Resumption:
    """The part of a resumed stream that is left out, because the client has it."""

    def __init__(self, sent: bytes):
        self._left: dict[tuple[int, str], str] = {}  # text that is still to be left out, by choice and channel
        self._finished: set[int] = set()
        self._head: dict[str, Any] = {}
        self._had_usage = False
        for data in _split(sent):
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
        """Return the part of some events that the client lacks."""
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
        """Return what the client lacks of an event; None if it lacks nothing."""
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
