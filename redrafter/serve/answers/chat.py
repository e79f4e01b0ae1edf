"""The answers of `/v1/chat/completions`: text, thoughts and calls."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.serve.answers.openai_format import Choice, Line
from redrafter.serve.answers.text import text_of
from redrafter.serve.chat.reader import Call, ChatReader, Event, Span
from redrafter.serve.chat.tools import called

__all__ = ["Chat"]


class Chat:
    """Writes answers to a chat.

    Args:
        count: How many of the likeliest tokens are told beside each token; None for no log-probabilities.
        tokenizer: The tokenizer of the model.
        names: The tools that may be called.
        several: Whether an answer may have more than one call.
        thinks: Whether thoughts are told apart.
        thinking: Whether a text begins within thoughts.
    """

    kind, prefix, part_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        count: int | None,
        tokenizer: PreTrainedTokenizerBase,
        names: frozenset[str] = frozenset(),
        several: bool = True,
        thinks: bool = False,
        thinking: bool = False,
    ):
        self._count, self._tokenizer = count, tokenizer
        self._reading = (names, several, thinks, thinking)
        self._readers: dict[int, ChatReader] = {}

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        reader = ChatReader(*self._reading)
        events = reader.push(choice.text, last=True)
        content, thoughts, calls = _joined(reader, events, False), _joined(reader, events, True), called(events)
        message = {
            "role": "assistant",
            "content": content if content or not (thoughts or calls) else None,
            "refusal": None,
            **({"reasoning_content": thoughts} if thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        told, finish = self._told(choice.lines), _finish(choice, reader)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": finish}

    def parts(self, index: int, text: str, lines: list[Line], choice: Choice, first: bool) -> list[dict[str, Any]]:
        reader = self._readers.setdefault(index, ChatReader(*self._reading))
        events = reader.push(text, last=choice.finish is not None)
        deltas = list(_deltas(reader, events))
        if not deltas and (first or lines or choice.finish is not None):
            deltas = [({}, [])]
        found = []
        for number, (delta, spans) in enumerate(deltas):
            opening = {"role": "assistant"} if first and number == 0 else {}
            if opening and not (self._reading[0] or self._reading[2]):
                opening["content"] = ""
            last = number == len(deltas) - 1
            part = {
                "index": index,
                "delta": opening | delta,
                "logprobs": self._told(lines) if lines and number == 0 else None,
                "finish_reason": _finish(choice, reader) if last else None,
            }
            found.append(part | choice.runs_of(spans))
        return found

    def _told(self, lines: list[Line]) -> dict[str, Any] | None:
        if self._count is None:
            return None
        return {
            "content": [
                self._entry(token, own) | {"top_logprobs": [self._entry(*pair) for pair in likeliest.items()]}
                for _, token, own, likeliest in lines
            ],
            "refusal": None,
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = text_of(self._tokenizer, [token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _finish(choice: Choice, reader: ChatReader) -> str | None:
    """Why an answer ended. One that was cut within a call has no whole call to be answered."""
    return "tool_calls" if choice.finish is not None and reader.calls and not reader.cut else choice.finish


def _joined(reader: ChatReader, events: Iterable[Event], thought: bool) -> str:
    spans = (each for each in events if isinstance(each, Span) and each.thought == thought)
    return "".join(reader.text[each.begin : each.end] for each in spans)


def _deltas(reader: ChatReader, events: list[Event]) -> Iterable[tuple[dict[str, Any], list[tuple[int, int]]]]:
    """Yield what changes in a message, each with the characters of its content. A call has a delta of its own before
    those of its arguments, as OpenAI has it."""
    spans = [each for each in events if isinstance(each, Span)]
    calls = [each for each in events if not isinstance(each, Span)]
    if spans:
        thoughts, content = _joined(reader, spans, True), _joined(reader, spans, False)
        delta = {"reasoning_content": thoughts} if thoughts else {}
        yield (
            delta | ({"content": content} if content else {}),
            [(each.begin, each.end) for each in spans if not each.thought],
        )
    for event in calls:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": ""}
            told = {"index": event.number, "id": event.id, "type": "function", "function": function}
        else:
            told = {"index": event.number, "function": {"arguments": event.text}}
        yield {"tool_calls": [told]}, []
