"""From pieces of texts to OpenAI's answers, whole or as a stream."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from redrafter.engine.outputs import Stats
from redrafter.errors import ArgumentError
from redrafter.scheduler.sequence import SequenceDelta, TokenSequence
from redrafter.serve.answers.prompt_logprobs import PromptLine, by_text, prompt_lines, prompt_logprobs
from redrafter.serve.answers.text import TextStream, text_of
from redrafter.serve.protocol.requests import ApiError, StreamOptions
from redrafter.serve.worker import SlowConsumerError, Stopped

__all__ = ["Choice", "Completion", "Line", "answer", "stream", "told", "with_cuts_told"]

_LOG = logging.getLogger(__name__)

Pieces = AsyncIterator[tuple[int, TokenSequence, list[SequenceDelta]]]
# A token's text, its id, its log-probability and the likeliest ones'.
Line = tuple[str, int, float, Mapping[int, float]]


class Choice:
    """One text of an answer. drafts: whether the parts of a stream tell which of it drafts wrote."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], drafts: bool = False):
        self._tokenizer, self._stream, self._drafts = tokenizer, TextStream(tokenizer, stops), drafts
        self.job: TokenSequence | None = None
        self.taken = 0  # tokens; the engine may be ahead of that
        self.lines: list[Line] = []
        self.logprob = 0.0  # of all tokens, the one that ends the text too, where log-probabilities were asked for
        self.finish: str | None = None

    @property
    def text(self) -> str:
        return self._stream.text

    def take(self, job: TokenSequence, pieces: Sequence[SequenceDelta]) -> tuple[str, list[Line]]:
        """What pieces add: text, and log-probabilities where they were asked for."""
        self.job = job
        found = [self._take(job, piece) for piece in pieces]
        return "".join(text for text, _ in found), [line for _, lines in found for line in lines]

    def _take(self, job: TokenSequence, piece: SequenceDelta) -> tuple[str, list[Line]]:
        if piece.finish == "error":
            theirs = isinstance(piece.error, ArgumentError)
            raise ApiError(400 if theirs else 500, f"{piece.error}" if theirs else f"the engine failed: {piece.error}")
        shown = piece.tokens
        self.taken += len(shown)
        if piece.finish == "stop" and shown and shown[-1] in job.params.stop_token_ids:
            shown = shown[:-1]
        lines = [
            (text_of(self._tokenizer, [token]), token, own, likeliest)
            for token, (own, likeliest) in zip(shown, piece.logprobs or (), strict=False)
        ]
        self.lines += lines
        self.logprob += sum(own for own, _ in piece.logprobs or ())
        self.finish = piece.finish or self.finish
        accepted = piece.accepted if self._drafts else 0
        return self._stream.push(shown, last=piece.finish is not None, accepted=accepted), lines

    def runs(self, before: str = "") -> dict[str, Any]:
        """What a part says of the text since the last one that told; nothing unless asked for. before: the prompt,
        where it stands before the text."""
        if not self._drafts:
            return {}
        return _told_runs([(before, False), *self._stream.runs()])

    def runs_of(self, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """What a part says of some characters of the text; nothing unless asked for."""
        return _told_runs([run for span in spans for run in self._stream.runs_of(*span)]) if self._drafts else {}


def _told_runs(runs: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {"drafts": [{"text": text, "accepted": accepted} for text, accepted in runs if text]}


class Form(Protocol):
    """How one kind of answer is written. whole: of an answer at once; parts: of a stream, of what a choice has gained,
    with the first or last of a choice's; none where nothing can be told yet."""

    kind: str
    prefix: str
    part_kind: str

    def whole(self, index: int, choice: Choice) -> dict[str, Any]: ...

    def parts(self, index: int, text: str, lines: list[Line], choice: Choice, first: bool) -> list[dict[str, Any]]: ...


class Completion:
    """`/v1/completions`. echo: of each choice, the prompt before its text. logprobs: how many of the likeliest tokens
    are told beside each; None for no log-probabilities. prompt: the same of the prompt, in `prompt_logprobs`."""

    kind = part_kind = "text_completion"
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

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._prompt(index) + choice.text
        told = self._told(index, choice.lines, self._echoed(choice))
        found = {"index": index, "text": text, "logprobs": told, "finish_reason": choice.finish}
        if self._prompt_count is None or choice.job is None:
            return found
        return found | {"prompt_logprobs": prompt_logprobs(choice.job, self._prompt_count, self._tokenizer)}

    def parts(self, index: int, text: str, lines: list[Line], choice: Choice, first: bool) -> list[dict[str, Any]]:
        before = self._prompt(index) if first else ""
        told, finish = self._told(index, lines, self._echoed(choice) if first else []), choice.finish
        part = {"index": index, "text": before + text, "logprobs": told, "finish_reason": finish}
        return [part | choice.runs(before)]

    def _prompt(self, index: int) -> str:
        return self._echo[index] if self._echo is not None else ""

    def _echoed(self, choice: Choice) -> list[PromptLine]:
        if self._echo is None or self._logprobs is None or choice.job is None:
            return []
        return prompt_lines(choice.job, self._logprobs, self._tokenizer)

    def _told(self, index: int, lines: list[Line], before: list[PromptLine]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        offset, offsets = self._offsets.get(index, len(self._prompt(index))), [line.offset for line in before]
        for text, *_ in lines:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        tops = [by_text(likeliest, token, own, self._tokenizer) for _, token, own, likeliest in lines]
        return {
            "text_offset": offsets,
            "token_logprobs": [line.logprob for line in before] + [own for _, _, own, _ in lines],
            "tokens": [line.text for line in before] + [text for text, *_ in lines],
            "top_logprobs": [line.likeliest for line in before] + tops,
        }


async def answer(
    pieces: Pieces, choices: list[Choice], form: Form, model: str, best: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """The whole answer. best: of each so many choices, how many are told, those whose tokens are likeliest."""
    async for index, job, found in pieces:
        choices[index].take(job, found)
    told = choices if best[0] == best[1] else [choice for group in _groups(choices, *best) for choice in group]

    def wholes() -> list[dict[str, Any]]:
        return [form.whole(index, choice) for index, choice in enumerate(told)]

    scored = any(choice.job is not None and choice.job.prompt_scores for choice in told)
    written = await asyncio.to_thread(wholes) if scored else wholes()  # a prompt's tokens may be many
    return _head(form.kind, form.prefix, model) | {"choices": written, **_tail(choices)}


def _groups(choices: Sequence[Choice], copies: int, keep: int) -> Iterator[list[Choice]]:
    """Of each prompt's texts those whose tokens have the highest mean log-probability, the best first."""
    for begin in range(0, len(choices), copies):
        group = choices[begin : begin + copies]
        yield sorted(group, key=lambda choice: choice.logprob / max(choice.taken, 1), reverse=True)[:keep]


async def stream(
    pieces: Pieces, choices: list[Choice], form: Form, model: str, asked: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """The answer in parts, the last one without choices and with what `include_usage` asks for."""
    head = _head(form.part_kind, form.prefix, model)
    begun: set[int] = set()
    async for index, job, found in pieces:
        choice = choices[index]
        text, lines = choice.take(job, found)
        if text or lines or choice.finish or index not in begun:
            own = _usage([choice], [job]) if asked.continuous_usage_stats else None
            usage = {"usage": own} if asked.include_usage else {}
            for part in form.parts(index, text, lines, choice, index not in begun):
                yield head | {"choices": [part]} | usage
                begun.add(index)
    if asked.include_usage:
        yield head | {"choices": [], **_tail(choices)}


async def with_cuts_told(parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of a stream; where it is cut off, raise an `ApiError`, which each protocol tells in its way."""
    try:
        async for part in parts:
            yield part
    except Stopped as error:
        raise ApiError(503, "the server is stopping") from error
    except SlowConsumerError as error:  # the client may hear of it yet
        _LOG.warning("an answer was cut off: %s", error)
        raise ApiError(500, f"the answer was cut off: {error}") from error


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _tail(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens, and how speculation went. A prompt counts once, however many texts follow it."""
    jobs = [choice.job for choice in choices if choice.job is not None]
    usage = _usage(choices, {tuple(job.prompt): job for job in jobs}.values())
    return {"usage": usage, "metrics": {"speculative_decoding": speculation([job.stats for job in jobs])}}


def told(choices: Sequence[Choice]) -> dict[str, Any]:
    """What a log says of an answer; of one that nobody waited for, what there was of it."""
    jobs = [choice.job for choice in choices if choice.job is not None]
    if not jobs:
        return {}
    usage = _usage(choices, {tuple(job.prompt): job for job in jobs}.values())
    waits = [job.first_token_at - job.arrived_at for job in jobs if job.first_token_at is not None]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "first_token_seconds": round(min(waits), 4) if waits else None,
        "tokens_per_step": round(speculation([job.stats for job in jobs])["mean_acceptance_length"], 3),
        "finish": ",".join(choice.finish or "left" for choice in choices),
    }


def _usage(choices: Iterable[Choice], prompts: Collection[TokenSequence]) -> dict[str, Any]:
    """Tokens so far. prompts: the jobs whose prompts count."""
    read, written = sum(len(job.prompt) for job in prompts), sum(choice.taken for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(job.reused for job in prompts)},
    }


def speculation(stats: Sequence[Stats]) -> dict[str, Any]:
    """In vLLM's words (vllm-project/vllm#48915): mean_acceptance_length counts the token that follows the drafts too;
    entry j of the histogram counts the steps that accepted exactly j drafts. A step without drafts is none of these.
    Beside them, of the steps that accepted d drafts, the share that accepted one more."""
    steps, drafted, accepted = (sum(getattr(each, name) for each in stats) for name in ("steps", "drafted", "accepted"))
    depth = max((len(each.accepted_by_depth) for each in stats), default=0)
    reached = [steps, *(sum(each.accepted_by_depth[d] for each in stats) for d in range(depth))]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
        "acceptance_by_depth": [b / a if a else None for a, b in pairwise(reached)],
    }
