"""Format the engine's output as OpenAI's completion and chat answers, whole or streamed."""

import asyncio
import logging
import time
import uuid
from array import array
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count, islice
from types import MappingProxyType
from typing import Any, TypeVar

from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.engine.detokenizer import Detokenizer
from redrafter.errors import ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import Choice, ChoiceContext, TokenLine, count_usage, usage_and_metrics
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.protocol.fields import StreamOptions
from redrafter.serve.protocol.requests import ApiError, ChatRequest, CompletionRequest

_LOG = logging.getLogger(__name__)


class CompletionChoice(Choice):
    """A choice of `/v1/completions`. `echo` is the prompt text to return before it."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, prompt: Sequence[int], request: CompletionRequest, context: ChoiceContext, echo: str = ""):
        super().__init__(prompt, request, context)
        self._echo, self._echoes, self._count = echo, request.echo, request.logprobs

    def format_choice(self, index: int) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        text, logprobs = self._echo + self.text, self._logprobs_field(self.lines, True)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.finish}

    def format_chunks(self, index: int, text: str, lines: list[TokenLine]) -> list[dict[str, Any]]:
        """Return the entry of `choices` of a stream's chunk. The arguments are as in `ChatChoice.format_chunks`."""
        before, logprobs = "" if self.shown else self._echo, self._logprobs_field(lines, not self.shown)
        entry = {"index": index, "text": before + text, "logprobs": logprobs, "finish_reason": self.finish}
        return [entry | self.draft_runs(before=before)]

    def _logprobs_field(self, lines: list[TokenLine], first: bool) -> dict[str, Any] | None:
        """Return the `logprobs` field of new tokens; the `first` call begins with the echoed prompt."""
        if self._count is None:
            return None
        offset, reported = len(self._echo), list[TokenLine]()
        # Offsets refer to the returned text, which begins with the echoed prompt.
        if self._echoes and first:
            detokenizer, end, at_first = Detokenizer(self._tokenizer), 0, True
            for index, token in enumerate(self.prompt):
                logprob, likeliest = None, dict[int, float]()
                if index:  # the first token has no context
                    score = self.prompt_scores[index - 1]
                    logprob, likeliest = score.logprob, dict(islice(score.likeliest.items(), self._count))
                reported.append(TokenLine(token, logprob, likeliest, end, at_first))
                at_first &= token in self._token_writer.hidden
                end += len(detokenizer.push([token]))  # the echoed text lacks special tokens
        reported += [line._replace(offset=line.offset + offset) for line in lines]
        return self._token_writer.completion_field(reported)


class ChatChoice(Choice):
    """A choice of `/v1/chat/completions`, which may contain thoughts and tool calls.

    Args:
        form: Reader of the model's tool-call format.
        special: Special tokens by id. Marks of the format among them are kept in the text that is parsed.
        thoughts: Marks of thoughts, which become `reasoning_content`; None leaves thoughts in the content.
        thinking: Whether the output begins within a thought that the prompt opened, or may begin with one.
        reads_calls: Whether to parse tool calls; content that is constrained by a grammar has none.
    """

    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def __init__(
        self,
        prompt: Sequence[int],
        request: ChatRequest,
        context: ChoiceContext,
        form: type[ChatReader] = ChatReader,
        special: Mapping[int, str] = MappingProxyType({}),
        thoughts: ThoughtMarks | None = None,
        thinking: Thinking = "possible",
        reads_calls: bool = True,
    ):
        tools = {tool.function.name: tool.function.parameters for tool in request.callable_tools if reads_calls}
        # Special tokens that the reader looks for must stay in the text; all others are hidden.
        seen = form.marks if tools or form.has_channels else ()
        seen += (thoughts.begin, thoughts.end) if thoughts is not None else ()
        hidden = {token for token, content in special.items() if not any(content in mark for mark in seen)}
        super().__init__(prompt, request, context, hidden=hidden if len(hidden) < len(special) else None)
        self._logprobs = request.logprobs
        self._reader = form(tools, request.parallel_tool_calls is not False, thoughts, thinking)
        self._may_lack_content = bool(tools or thoughts is not None)
        # End offset of each token's text, to count the tokens of thoughts.
        self._token_ends: array[int] | None = None if thoughts is None else array("l")
        self._counted = self._thought_tokens = 0  # completed thoughts counted so far, and their tokens

    def _decode(self, tokens: Sequence[int], drafted: bool) -> None:
        if self._token_ends is None or not tokens:
            return super()._decode(tokens, drafted)
        for token in tokens:
            super()._decode([token], drafted)
            self._token_ends.append(len(self._drafted))

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thoughts and their marks in the text parsed so far."""
        ends, spans = self._token_ends or (), self._reader.thought_spans

        def count(begin: int, end: int) -> int:
            return bisect_right(ends, end) - (bisect_right(ends, begin) if begin else 0)

        # Count each thought once, since a stream asks after every chunk. A thought that is cut off may lack tokens.
        while self._counted < len(spans) and spans[self._counted][1] < (ends[-1] if ends else 0):
            self._thought_tokens += count(*spans[self._counted])
            self._counted += 1
        return self._thought_tokens + sum(count(*span) for span in spans[self._counted :])

    def format_choice(self, index: int) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        # Deltas of the stream are merged, so that both kinds of answers come from one parser.
        for delta, _ in self._reader.push(self.text, last=True):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({name: value for name, value in call.items() if name != "index"})
                    arguments.append([])
                else:
                    arguments[-1].append(call["function"]["arguments"])
            message |= delta
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if calls:
            message["tool_calls"] = calls
        # OpenAI's clients expect a string unless the answer consists of calls.
        elif "reasoning_content" not in message:
            message["content"] = message["content"] or ""
        logprobs = self._logprobs_field(self.lines)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def format_chunks(self, index: int, text: str, lines: list[TokenLine]) -> list[dict[str, Any]]:
        """Return entries of `choices` for a stream's chunks; empty if nothing can be sent yet.

        `text` is the new text of choice `index`, and `lines` its new tokens with log-probabilities, if requested.
        """
        first, deltas = not self.shown, self._reader.push(text, last=self.finish is not None)
        # A first chunk with the role, log-probabilities and the finish reason are sent even without text.
        if not deltas and (first or lines or self.finish is not None):
            deltas = [({}, [])]
        entries = []
        for number, (delta, spans) in enumerate(deltas):
            opening = {"role": "assistant"} if first and number == 0 else {}
            if opening and not self._may_lack_content:
                opening["content"] = ""
            entry = {
                "index": index,
                "delta": opening | delta,
                "logprobs": self._logprobs_field(lines) if lines and number == 0 else None,
                "finish_reason": self._finish_reason if number == len(deltas) - 1 else None,
            }
            entries.append(entry | self.draft_runs(spans))
        return entries

    @property
    def _finish_reason(self) -> str | None:
        """Finish reason. It is not `tool_calls` if the output was cut off within a call."""
        called = self.finish is not None and self._reader.calls and not self._reader.cut
        return "tool_calls" if called else self.finish

    def _logprobs_field(self, lines: list[TokenLine]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None

        return {"content": [self._token_writer.chat_entry(line) for line in lines], "refusal": None}


AnyChoice = TypeVar("AnyChoice", CompletionChoice, ChatChoice)
Pieces = AsyncIterator[tuple[AnyChoice, list[SequenceDelta]]]  # each choice with its new deltas


async def collect_answer(deltas: Pieces[AnyChoice], choices: list[AnyChoice], model: str) -> dict[str, Any]:
    """Collect all choices and return the whole answer; raise `ApiError` if a sequence failed.

    Args:
        deltas: New deltas of the choices, until the last one has ended.
        choices: The choices, grouped by prompt.
        model: Name of the model to put into the answer.
    """
    async for choice, gained in deltas:
        choice.append(gained)

    def entries() -> list[dict[str, Any]]:
        return [_with_stop(choice, choice.format_choice(index)) for index, choice in enumerate(choices)]

    # Scored prompts are formatted in a thread: with many tokens, formatting would block the event loop.
    formatted = await asyncio.to_thread(entries) if any(choice.prompt_scores for choice in choices) else entries()
    return _head(choices[0].kind, choices[0].prefix, model) | {"choices": formatted, **usage_and_metrics(choices)}


async def stream_answer(
    deltas: Pieces[AnyChoice], choices: list[AnyChoice], model: str, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield an answer in chunks, or raise `ApiError` if a sequence failed. Takes the arguments of `collect_answer`.

    With `include_usage`, a last chunk has the usage and no choices.
    """
    head, indices = _head(choices[0].chunk_kind, choices[0].prefix, model), dict(zip(choices, count(), strict=False))
    async for choice, gained in deltas:
        text, lines = choice.append(gained)
        # A chunk without content only costs bandwidth, except the first, which marks the start of the answer.
        if text or lines or choice.finish or not choice.shown:
            entries = choice.format_chunks(indices[choice], text, lines)
            so_far = count_usage([choice], [choice]) if options.continuous_usage_stats else None
            usage = {"usage": so_far} if options.include_usage else {}
            for entry in entries:
                choice.shown = True
                yield head | {"choices": [_with_stop(choice, entry)]} | usage
    if options.include_usage:
        yield head | {"choices": [], **usage_and_metrics(choices)}


def _with_stop(choice: Choice, entry: dict[str, Any]) -> dict[str, Any]:
    """Add vLLM's `stop_reason` to the last entry of a choice that a stop string has ended."""
    ended = choice.stop is not None and entry["finish_reason"] is not None
    return entry | {"stop_reason": choice.stop} if ended else entry


def error_of_cut(error: Exception) -> ApiError:
    """Return the last event of a stream that an error has cut off: the server stops, or a text cannot be formatted."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Stopped):
        return ApiError(503, str(error))
    named = isinstance(error, ReDrafterError)
    _LOG.warning("an answer was cut off: %s", error, exc_info=None if named else error)
    return ApiError(500, f"the answer was cut off: {error if named else type(error).__name__}")


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
