"""Format of the answers of `/v1/chat/completions`: text, thoughts and tool calls."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import decode_tokens
from redrafter.serve.answers.choice import Choice, TokenLine
from redrafter.serve.chat.reader import Call, ChatReader, Event, Span
from redrafter.serve.chat.tools import collect_calls

__all__ = ["ChatFormat"]


class ChatFormat:
    """Format of the answers to a chat.

    Args:
        count: How many of the likeliest tokens to list beside each token; None for no log-probabilities.
        tokenizer: The tokenizer of the model.
        names: Names of the tools that may be called.
        parallel_calls: Whether an answer may have more than one call.
        split_thoughts: Whether thoughts go into `reasoning_content`, not into the content.
        thinking: Whether a text begins within thoughts, because the prompt has opened them.
    """

    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        count: int | None,
        tokenizer: PreTrainedTokenizerBase,
        names: frozenset[str] = frozenset(),
        parallel_calls: bool = True,
        split_thoughts: bool = False,
        thinking: bool = False,
    ):
        self._count, self._tokenizer = count, tokenizer
        self._reader_options = (names, parallel_calls, split_thoughts, thinking)
        self._readers: dict[int, ChatReader] = {}

    def format_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        reader = ChatReader(*self._reader_options)
        events = reader.push(choice.text, last=True)
        content, thoughts = _join_spans(reader, events, False), _join_spans(reader, events, True)
        calls = collect_calls(events)
        message = {
            "role": "assistant",
            "content": content if content or not (thoughts or calls) else None,
            "refusal": None,
            **({"reasoning_content": thoughts} if thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        logprobs, finish = self._logprobs_field(choice.lines), _finish_reason(choice, reader)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def format_chunks(
        self, index: int, text: str, lines: list[TokenLine], choice: Choice, first: bool
    ) -> list[dict[str, Any]]:
        """Return entries of `choices` of a stream's chunks; arguments as in `AnswerFormat`."""
        reader = self._readers.setdefault(index, ChatReader(*self._reader_options))
        events = reader.push(text, last=choice.finish is not None)
        deltas = list(_deltas(reader, events))
        if not deltas and (first or lines or choice.finish is not None):
            deltas = [({}, [])]
        names, _, split_thoughts, _ = self._reader_options
        entries = []
        for number, (delta, spans) in enumerate(deltas):
            opening = {"role": "assistant"} if first and number == 0 else {}
            if opening and not (names or split_thoughts):
                opening["content"] = ""
            last = number == len(deltas) - 1
            entry = {
                "index": index,
                "delta": opening | delta,
                "logprobs": self._logprobs_field(lines) if lines and number == 0 else None,
                "finish_reason": _finish_reason(choice, reader) if last else None,
            }
            entries.append(entry | choice.draft_runs(spans))
        return entries

    def _logprobs_field(self, lines: list[TokenLine]) -> dict[str, Any] | None:
        if self._count is None:
            return None
        return {
            "content": [
                self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in likeliest.items()]}
                for _, token, logprob, likeliest in lines
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = decode_tokens(self._tokenizer, [token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _finish_reason(choice: Choice, reader: ChatReader) -> str | None:
    """Return why a text ended. `tool_calls` is not the reason of one that was cut within a call."""
    return "tool_calls" if choice.finish is not None and reader.calls and not reader.cut else choice.finish


def _join_spans(reader: ChatReader, events: Iterable[Event], thought: bool) -> str:
    """Return the text of all spans of thoughts, or of all others."""
    spans = (event for event in events if isinstance(event, Span) and event.thought == thought)
    return "".join(reader.text[span.begin : span.end] for span in spans)


def _deltas(reader: ChatReader, events: list[Event]) -> Iterable[tuple[dict[str, Any], list[tuple[int, int]]]]:
    """Yield the deltas of a message, each with the spans of its content.

    A call begins with a delta of its own, and those of its arguments follow, as OpenAI has it.
    """
    spans = [event for event in events if isinstance(event, Span)]
    calls = [event for event in events if not isinstance(event, Span)]
    if spans:
        thoughts, content = _join_spans(reader, spans, True), _join_spans(reader, spans, False)
        delta = {"reasoning_content": thoughts} if thoughts else {}
        yield (
            delta | ({"content": content} if content else {}),
            [(span.begin, span.end) for span in spans if not span.thought],
        )
    for event in calls:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.number, "id": event.id, "type": "function", "function": function}
        else:
            call = {"index": event.number, "function": {"arguments": event.text}}
        yield {"tool_calls": [call]}, []
