"""What the engine writes as OpenAI's answers, whole or as a stream: of completions and of chats."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer, decode_tokens
from redrafter.errors import ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import Choice, TokenLine, count_usage, usage_and_metrics
from redrafter.serve.answers.reader import Call, ChatReader, Event, Span, collect_calls
from redrafter.serve.engine_process.client import ServedSequence, Stopped
from redrafter.serve.protocol.fields import StreamOptions
from redrafter.serve.protocol.requests import ApiError

_LOG = logging.getLogger(__name__)

MAX_SCORES = 1 << 18  # log-probabilities of prompts in one answer, which may be 100 MB in memory

# The index of a choice, its sequence, and what the sequence has gained.
Pieces = AsyncIterator[tuple[int, ServedSequence, list[SequenceDelta]]]


class CompletionFormat:
    """Format of the answers of `/v1/completions`.

    Args:
        echo: Of each choice, the prompt to put before its text; None to echo nothing.
        logprobs: How many of the likeliest tokens to list beside each token; None for no log-probabilities.
        tokenizer: The model's tokenizer.
        prompt: The same of the prompt's tokens, for `prompt_logprobs`; None for no such field.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        echo: Sequence[str] | None,
        logprobs: int | None,
        tokenizer: PreTrainedTokenizerBase,
        prompt: int | None = None,
    ):
        self._echo, self._logprobs, self._tokenizer, self._prompt_count = echo, logprobs, tokenizer, prompt
        self._offsets: dict[int, int] = {}

    def format_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        text, logprobs = self._echoed(index) + choice.text, self._logprobs_field(index, choice.lines, choice)
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
        if self._prompt_count is None or choice.sequence is None:
            return entry
        return entry | {"prompt_logprobs": prompt_logprobs(choice.sequence, self._prompt_count, self._tokenizer)}

    def format_chunks(
        self, index: int, text: str, lines: list[TokenLine], choice: Choice, first: bool
    ) -> list[dict[str, Any]]:
        """Return the entry of `choices` of a stream's chunk; arguments as in `ChatFormat`."""
        before = self._echoed(index) if first else ""
        logprobs = self._logprobs_field(index, lines, choice if first else None)
        entry = {"index": index, "text": before + text, "logprobs": logprobs, "finish_reason": choice.finish}
        return [entry | choice.draft_runs(before=before)]

    def _echoed(self, index: int) -> str:
        return self._echo[index] if self._echo is not None else ""

    def _logprobs_field(self, index: int, lines: list[TokenLine], first: Choice | None) -> dict[str, Any] | None:
        """Return the `logprobs` field of new tokens, after those of the echoed prompt where it is the `first` one."""
        if self._logprobs is None:
            return None
        texts, offsets, logprobs = list[str](), list[int](), list[float | None]()
        tops: list[dict[str, float] | None] = []
        tokenizer = self._tokenizer
        if self._echo is not None and first is not None and first.sequence is not None:
            detokenizer, end, sequence = Detokenizer(tokenizer), 0, first.sequence
            for token in sequence.prompt:
                offsets.append(end)  # of the echoed text, which lacks special tokens
                end += len(detokenizer.push([token]))
                texts.append(decode_tokens(tokenizer, [token]))
            logprobs.append(None)  # the first token follows nothing
            tops.append(None)
            for token, score in zip(sequence.prompt[1:], sequence.prompt_scores, strict=True):
                logprobs.append(score.logprob)
                tops.append(
                    _by_text(dict(islice(score.likeliest.items(), self._logprobs)), token, score.logprob, tokenizer)
                )
        offset = self._offsets.get(index, len(self._echoed(index)))
        for text, token, logprob, likeliest in lines:
            texts.append(text)
            offsets.append(offset)
            logprobs.append(logprob)
            tops.append(_by_text(likeliest, token, logprob, tokenizer))
            offset += len(text)
        self._offsets[index] = offset
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": tops}


def _by_text(
    likeliest: Mapping[int, float], token: int, logprob: float, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Return log-probabilities by the text of their tokens, the written token and its own always among them.

    Where several tokens have one text, as parts of characters do, the keys of the others are `token_id:` and the id.
    """
    logprobs = {decode_tokens(tokenizer, [token]): logprob}
    for other, value in likeliest.items():
        if other != token:
            text = decode_tokens(tokenizer, [other])
            logprobs[f"token_id:{other}" if text in logprobs else text] = value
    return logprobs


def check_scores(prompts: Sequence[Sequence[int]], count: int | None) -> None:
    """Raise `ApiError` for more log-probabilities of prompts than `MAX_SCORES`, `count` beside each of their tokens."""
    if count is not None and (scores := (count + 1) * sum(map(len, prompts))) > MAX_SCORES:
        raise ApiError(
            400,
            f"{scores} log-probabilities of prompts in one answer; at most {MAX_SCORES}: ask for fewer at each place, "
            "or for fewer or shorter prompts in a request",
            "prompt_logprobs",
        )


def prompt_logprobs(
    sequence: ServedSequence, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a scored prompt in vLLM's format.

    Of each token, there are entries by id for it and for the `count` likeliest tokens; the first one follows nothing.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": decode_tokens(tokenizer, [token])}

    entries: list[dict[str, Any] | None] = [None]
    for token, score in zip(sequence.prompt[1:], sequence.prompt_scores, strict=True):
        ranked = enumerate(islice(score.likeliest.items(), count), 1)
        others = {f"{other}": entry(other, value, rank) for rank, (other, value) in ranked if other != token}
        entries.append({f"{token}": entry(token, score.logprob, score.rank)} | others)
    return entries


class ChatFormat:
    """Format of the answers of `/v1/chat/completions`: text, thoughts and tool calls.

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
        """Return entries of `choices` of a stream's chunks; none where nothing can be sent yet.

        `text` and `lines` are what choice `index` has gained, tokens with log-probabilities where these were asked for;
        `first` says whether no chunk of it was sent before.
        """
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
            entry = {
                "index": index,
                "delta": opening | delta,
                "logprobs": self._logprobs_field(lines) if lines and number == 0 else None,
                "finish_reason": _finish_reason(choice, reader) if number == len(deltas) - 1 else None,
            }
            entries.append(entry | choice.draft_runs(spans))
        return entries

    def _logprobs_field(self, lines: list[TokenLine]) -> dict[str, Any] | None:
        if self._count is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = decode_tokens(self._tokenizer, [token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in likeliest.items()]}
            for _, token, logprob, likeliest in lines
        ]
        return {"content": content, "refusal": None}


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
    if spans:
        thoughts, content = _join_spans(reader, spans, True), _join_spans(reader, spans, False)
        delta = {"reasoning_content": thoughts} if thoughts else {}
        shown = [(span.begin, span.end) for span in spans if not span.thought]
        yield delta | ({"content": content} if content else {}), shown
    for event in events:
        if isinstance(event, Call):
            function = {"name": event.name, "arguments": ""}
            yield (
                {"tool_calls": [{"index": event.number, "id": event.id, "type": "function", "function": function}]},
                [],
            )
        elif not isinstance(event, Span):
            yield {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}, []


AnswerFormat = CompletionFormat | ChatFormat


async def collect_answer(
    deltas: Pieces, choices: list[Choice], form: AnswerFormat, model: str, best: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Return a whole answer, once all its texts have ended, or raise `ApiError` if a sequence failed.

    Args:
        deltas: What the sequences gain, until the last one has ended.
        choices: The texts; those of one prompt follow each other.
        form: Format of the answer.
        model: Name of the model, for the answer.
        best: Texts written after each prompt, and how many of them to keep, the best first: those with the highest mean
            log-probability of a token.
    """
    async for index, sequence, gained in deltas:
        choices[index].append(sequence, gained)
    written, kept = best
    chosen = list(choices)
    if written != kept:
        groups = (choices[begin : begin + written] for begin in range(0, len(choices), written))
        chosen = [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: choice.logprob / max(choice.token_count, 1), reverse=True)[
                :kept
            ]
        ]

    def entries() -> list[dict[str, Any]]:
        return [form.format_choice(index, choice) for index, choice in enumerate(chosen)]

    # In a thread where prompts are scored: they may have many tokens.
    scored = any(choice.sequence is not None and choice.sequence.prompt_scores for choice in chosen)
    formatted = await asyncio.to_thread(entries) if scored else entries()
    return _head(form.kind, form.prefix, model) | {"choices": formatted, **usage_and_metrics(choices)}


async def stream_answer(
    deltas: Pieces, choices: list[Choice], form: AnswerFormat, model: str, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield an answer in chunks, or raise `ApiError` if a sequence failed; arguments as in `collect_answer`.

    With `include_usage`, a last chunk has the usage and no choices.
    """
    head = _head(form.chunk_kind, form.prefix, model)
    started: set[int] = set()
    async for index, sequence, gained in deltas:
        choice = choices[index]
        text, lines = choice.append(sequence, gained)
        if text or lines or choice.finish or index not in started:
            so_far = count_usage([choice], [sequence]) if options.continuous_usage_stats else None
            usage = {"usage": so_far} if options.include_usage else {}
            for entry in form.format_chunks(index, text, lines, choice, index not in started):
                yield head | {"choices": [entry]} | usage
                started.add(index)
    if options.include_usage:
        yield head | {"choices": [], **usage_and_metrics(choices)}


async def raise_cuts_as_errors(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of `stream_answer`, and raise `ApiError` where the stream is cut off.

    That is where the server is stopping, the client reads too slowly, or a text cannot be told.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except Stopped as error:
        raise ApiError(503, str(error)) from error
    except ApiError:
        raise
    except Exception as error:  # such as `SlowConsumerError`; the client may hear of it yet
        named = isinstance(error, ReDrafterError)
        _LOG.warning("an answer was cut off: %s", error, exc_info=None if named else error)
        raise ApiError(500, f"the answer was cut off: {error if named else type(error).__name__}") from error


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
