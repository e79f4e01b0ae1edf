"""What is text, what is thought and what is a call in what a model writes, as it writes it.

A call is a JSON object with `name`, the name of a known tool, and `arguments` (or `parameters`): at the beginning of
the text, alone or in a list, or anywhere between `<tool_call>` and `</tool_call>`. That is what models of the Llama,
Qwen and Hermes families are trained to write. Thoughts stand at the beginning, between `<think>` and `</think>`.

What is found does not depend on the pieces in which the text comes.
"""

import json
import uuid
from dataclasses import dataclass

from redrafter.serve.chat.cursor import Cursor, Steps

__all__ = ["Call", "ChatReader", "Fragment", "Span"]

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Span:
    """Characters `begin` to `end` of what was written belong to the answer's text, or to its thoughts."""

    begin: int
    end: int
    thought: bool = False


@dataclass(frozen=True)
class Call:
    """A call begins, the one of that number."""

    number: int
    id: str
    name: str


@dataclass(frozen=True)
class Fragment:
    """More of a call's arguments, as the model wrote them."""

    number: int
    text: str


Event = Span | Call | Fragment


class ChatReader(Cursor):
    """`push` text, get what is certain of it.

    Args:
        names: The tools that may be called.
        several: Whether more than one call is told; else what follows the first is left out.
        thinks: Whether thoughts are told apart.
        thinking: Whether the text begins within thoughts.
    """

    def __init__(self, names: frozenset[str], several: bool = True, thinks: bool = False, thinking: bool = False):
        super().__init__()
        self._names, self._several, self._thinks, self._thinking = names, several, thinks, thinking
        self.calls = 0  # that have begun
        self.cut = False  # whether the text ends within a call
        self._from = 0  # where what was not told yet begins
        self._seen = 0  # up to where spaces were looked for
        self._sent: int | None = None  # within arguments, where those that were not told yet begin
        self._events: list[Event] = []
        self._steps = self._read()

    def push(self, text: str, last: bool = False) -> list[Event]:
        """Return what this text makes certain. last: whether it is the end."""
        self.text += text
        self._last = last
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Steps:
        if self._thinks:
            yield from self._thoughts()
        if not self._names:
            return (yield from self._plain())
        yield from self._skip(_SPACE)
        if (yield from self._more()) and self.text[self._at] in "{[":
            yield from self._group()
        while (yield from self._until(_CALL, False)):
            if (yield from self._group()):
                yield from self._skip(_SPACE)
                if (yield from self._literal(_CALL_END)):
                    self._from = self._at
        return True

    def _thoughts(self) -> Steps:
        if not self._thinking:
            yield from self._skip(_SPACE)
            if not (yield from self._literal(_THINK)):
                self._at = self._from
                return False
        yield from self._skip(_SPACE)
        self._from = self._at
        self._thinking = True
        yield from self._until(_THINK_END, True)
        self._thinking = False
        yield from self._skip(_SPACE)
        self._from = self._at
        return True

    def _plain(self) -> Steps:
        while True:
            self._tell(len(self.text), False)
            if self._last:
                return True
            yield

    def _until(self, mark: str, thought: bool) -> Steps:
        """Tell what stands before a mark, but for spaces right before it, and go behind it. False at the end."""
        while (place := self.text.find(mark, self._at)) < 0:
            sure = len(self.text) - _beginning(self.text, mark)
            self._at = max(self._at, sure)
            if self._last:
                end = len(self.text)
                self._tell(self._stripped(end) if thought or self.calls else end, thought)
                self._from = self._at = len(self.text)
                return False
            self._tell(self._stripped(self._at), thought)
            yield
        self._tell(self._stripped(place), thought)
        self._at = place + len(mark)
        return True

    def _group(self) -> Steps:
        """Read calls that follow each other. False where the first is none, and then it is text."""
        called = False
        while True:
            yield from self._skip(_SPACE + ("[" if not called else ",;]["))
            if called:
                self._from = self._at
            if not (yield from self._more()) or self.text[self._at] != "{" or not (yield from self._call()):
                return called
            called, self._from = True, self._at
            while not self._several:
                self._at = self._from = len(self.text)
                if self._last:
                    return True
                yield

    def _call(self) -> Steps:
        """Read an object, and tell of a call as soon as its name is known and its arguments begin."""
        name, told, arguments = None, False, "{}"
        self._at += 1
        while True:
            yield from self._skip(_SPACE + ",")
            if not (yield from self._more()) or self.text[self._at] not in '"}':
                self.cut = told and self._at == len(self.text)
                return told
            if self.text[self._at] == "}":
                break
            begin = self._at
            if not (yield from self._value()):
                self.cut = told
                return told
            key = self.text[begin : self._at]
            yield from self._skip(_SPACE + ":")
            if not (yield from self._more()):
                self.cut = told
                return told
            begin = self._at
            if key in ('"arguments"', '"parameters"') and name is not None and not told:
                told = True
                self._begin(name)
                self._sent = begin
            whole = yield from self._value()
            self._flush()
            self._sent = None
            if not whole:
                self.cut = told
                return told
            if key == '"name"' and not told and (name := _name(self.text[begin : self._at])) not in self._names:
                return False
            if key in ('"arguments"', '"parameters"'):
                arguments = self.text[begin : self._at]
        self._at += 1
        if not told and name is not None:
            self._begin(name)
            self._events.append(Fragment(self.calls - 1, arguments))
        return name is not None

    def _begin(self, name: str) -> None:
        self._events.append(Call(self.calls, f"call_{uuid.uuid4().hex[:24]}", name))
        self.calls += 1

    def _flush(self) -> None:
        if self._sent is not None and self._sent < self._at:
            self._events.append(Fragment(self.calls - 1, self.text[self._sent : self._at]))
            self._sent = self._at

    def _tell(self, end: int, thought: bool) -> None:
        if end > self._from:
            self._events.append(Span(self._from, end, thought))
            self._from = end

    def _stripped(self, end: int) -> int:
        """Where what was not told ends, without the spaces before `end`, which only grows."""
        begin = max(self._from, self._seen)  # before that, nothing but spaces was not told
        self._seen = end
        part = self.text[begin:end].rstrip()
        return begin + len(part) if part else self._from


def _beginning(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


def _name(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
