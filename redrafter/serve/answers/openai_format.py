"""Format what the engine writes as OpenAI's answers, whole or as a stream."""

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
from redrafter.serve.answers.text import TextStream, decode_tokens
from redrafter.serve.protocol.requests import ApiError, StreamOptions
from redrafter.serve.worker import SlowConsumerError, Stopped

__all__ = [
    "Choice",
    "CompletionFormat",
    "TokenLine",
    "collect_answer",
    "raise_cuts_as_errors",
    "stream_answer",
    "summarize",
]

_LOG = logging.getLogger(__name__)

# The index of a choice, its sequence, and what the sequence has gained.
Pieces = AsyncIterator[tuple[int, TokenSequence, list[SequenceDelta]]]
# A token's text, its id, its log-probability, and the log-probabilities of the likeliest ids.
TokenLine = tuple[str, int, float, Mapping[int, float]]


class Choice:
    """One text of an answer while it is written.

    Args:
        tokenizer: The model's tokenizer.
        stops: Stop strings, which end the text and are left out of it.
        drafts: Whether chunks of a stream say which characters accepted drafts wrote.

    Attributes:
        job: The sequence that writes the text; None before its first tokens.
        token_count: Tokens received so far; the engine may have written more.
        lines: Tokens with their log-probabilities, where these were asked for.
        logprob: Sum of the log-probabilities of all tokens, a final end token included; 0 where not asked for.
        finish: Why the text ended; None while it is written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], drafts: bool = False):
        self._tokenizer, self._stream, self._drafts = tokenizer, TextStream(tokenizer, stops), drafts
        self.job: TokenSequence | None = None
        self.token_count = 0
        self.lines: list[TokenLine] = []
        self.logprob = 0.0
        self.finish: str | None = None

    @property
    def text(self) -> str:
        """The text so far, without what may be the beginning of a stop string."""
        return self._stream.text

    def append(self, job: TokenSequence, pieces: Sequence[SequenceDelta]) -> tuple[str, list[TokenLine]]:
        """Append what a sequence has gained.

        Args:
            job: The sequence that writes this text.
            pieces: What it has gained since the last call.

        Returns:
            The text that is added, and its tokens with log-probabilities where these were asked for.

        Raises:
            ApiError: If the sequence failed.
        """
        self.job = job
        added = [self._append(job, piece) for piece in pieces]
        return "".join(text for text, _ in added), [line for _, lines in added for line in lines]

    def _append(self, job: TokenSequence, piece: SequenceDelta) -> tuple[str, list[TokenLine]]:
        if piece.finish == "error":
            if isinstance(piece.error, ArgumentError):
                raise ApiError(400, f"{piece.error}")
            raise ApiError(500, f"the engine failed: {piece.error}")
        shown = piece.tokens
        self.token_count += len(shown)
        if piece.finish == "stop" and shown and shown[-1] in job.params.stop_token_ids:
            shown = shown[:-1]
        lines = [
            (decode_tokens(self._tokenizer, [token]), token, logprob, likeliest)
            for token, (logprob, likeliest) in zip(shown, piece.logprobs or (), strict=False)
        ]
        self.lines += lines
        self.logprob += sum(logprob for logprob, _ in piece.logprobs or ())
        self.finish = piece.finish or self.finish
        accepted = piece.accepted if self._drafts else 0
        return self._stream.push(shown, last=piece.finish is not None, accepted=accepted), lines

    def new_draft_runs(self, before: str = "") -> dict[str, Any]:
        """Return the `drafts` field of a chunk for the text since the last call; empty unless asked for.

        Args:
            before: An echoed prompt that the chunk begins with.
        """
        if not self._drafts:
            return {}
        return _drafts_field([(before, False), *self._stream.new_runs()])

    def draft_runs(self, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the `drafts` field of a chunk for spans of the text's characters; empty unless asked for."""
        if not self._drafts:
            return {}
        return _drafts_field([run for span in spans for run in self._stream.runs(*span)])


def _drafts_field(runs: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    return {"drafts": [{"text": text, "accepted": accepted} for text, accepted in runs if text]}


class AnswerFormat(Protocol):
    """Shape of the answers of one route.

    Attributes:
        kind: `object` of a whole answer.
        prefix: Prefix of its `id`.
        chunk_kind: `object` of a chunk of a stream.
    """

    kind: str
    prefix: str
    chunk_kind: str

    def format_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return an entry of `choices` of a whole answer."""
        ...

    def format_chunks(
        self, index: int, text: str, lines: list[TokenLine], choice: Choice, first: bool
    ) -> list[dict[str, Any]]:
        """Return entries of `choices` of a stream's chunks; none where nothing can be sent yet.

        Args:
            index: Index of the choice.
            text: Text that the choice has gained.
            lines: Tokens that it has gained, with log-probabilities where these were asked for.
            choice: The choice, with what it has gained.
            first: Whether no chunk of the choice was sent before.
        """
        ...


class CompletionFormat:
    """Format of the answers of `/v1/completions`.

    Args:
        echo: Of each choice, the prompt to put before its text; None to echo nothing.
        logprobs: How many of the likeliest tokens to list beside each token; None for no log-probabilities.
        tokenizer: The model's tokenizer.
        prompt: How many of the likeliest tokens to list beside each token of the prompt, in `prompt_logprobs`; None
            for no such field.
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
        text = self._prompt(index) + choice.text
        logprobs = self._logprobs_field(index, choice.lines, self._echoed_lines(choice))
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
        if self._prompt_count is None or choice.job is None:
            return entry
        return entry | {"prompt_logprobs": prompt_logprobs(choice.job, self._prompt_count, self._tokenizer)}

    def format_chunks(
        self, index: int, text: str, lines: list[TokenLine], choice: Choice, first: bool
    ) -> list[dict[str, Any]]:
        """Return the entry of `choices` of a stream's chunk; arguments as in `AnswerFormat`."""
        before = self._prompt(index) if first else ""
        logprobs = self._logprobs_field(index, lines, self._echoed_lines(choice) if first else [])
        entry = {"index": index, "text": before + text, "logprobs": logprobs, "finish_reason": choice.finish}
        return [entry | choice.new_draft_runs(before)]

    def _prompt(self, index: int) -> str:
        return self._echo[index] if self._echo is not None else ""

    def _echoed_lines(self, choice: Choice) -> list[PromptLine]:
        if self._echo is None or self._logprobs is None or choice.job is None:
            return []
        return prompt_lines(choice.job, self._logprobs, self._tokenizer)

    def _logprobs_field(self, index: int, lines: list[TokenLine], before: list[PromptLine]) -> dict[str, Any] | None:
        """Return the `logprobs` field of new tokens, with those of an echoed prompt before them."""
        if self._logprobs is None:
            return None
        offset, offsets = self._offsets.get(index, len(self._prompt(index))), [line.offset for line in before]
        for text, *_ in lines:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        tops = [by_text(likeliest, token, logprob, self._tokenizer) for _, token, logprob, likeliest in lines]
        return {
            "text_offset": offsets,
            "token_logprobs": [line.logprob for line in before] + [logprob for _, _, logprob, _ in lines],
            "tokens": [line.text for line in before] + [text for text, *_ in lines],
            "top_logprobs": [line.likeliest for line in before] + tops,
        }


async def collect_answer(
    pieces: Pieces, choices: list[Choice], form: AnswerFormat, model: str, best: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Return a whole answer, once all its texts have ended.

    Args:
        pieces: What the sequences gain, until the last one has ended.
        choices: The texts; those of one prompt follow each other.
        form: Format of the answer.
        model: Name of the model, for the answer.
        best: Texts written after each prompt, and how many of them to keep: those whose tokens are likeliest.

    Raises:
        ApiError: If a sequence failed.
    """
    async for index, job, gained in pieces:
        choices[index].append(job, gained)
    written, kept = best
    if written == kept:
        chosen = choices
    else:
        chosen = [choice for group in _likeliest(choices, written, kept) for choice in group]

    def entries() -> list[dict[str, Any]]:
        return [form.format_choice(index, choice) for index, choice in enumerate(chosen)]

    # In a thread where prompts are scored: they may have many tokens.
    scored = any(choice.job is not None and choice.job.prompt_scores for choice in chosen)
    formatted = await asyncio.to_thread(entries) if scored else entries()
    return _head(form.kind, form.prefix, model) | {"choices": formatted, **_tail(choices)}


def _likeliest(choices: Sequence[Choice], copies: int, keep: int) -> Iterator[list[Choice]]:
    """Yield of each prompt's `copies` texts the `keep` with the highest mean log-probability, the best first."""
    for begin in range(0, len(choices), copies):
        group = choices[begin : begin + copies]
        yield sorted(group, key=lambda choice: choice.logprob / max(choice.token_count, 1), reverse=True)[:keep]


async def stream_answer(
    pieces: Pieces, choices: list[Choice], form: AnswerFormat, model: str, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield an answer in chunks. With `include_usage`, a last chunk has the usage and no choices.

    Args:
        pieces: What the sequences gain, until the last one has ended.
        choices: The texts.
        form: Format of the answer.
        model: Name of the model, for the answer.
        options: The request's `stream_options`.

    Raises:
        ApiError: If a sequence failed.
    """
    head = _head(form.chunk_kind, form.prefix, model)
    started: set[int] = set()
    async for index, job, gained in pieces:
        choice = choices[index]
        text, lines = choice.append(job, gained)
        if text or lines or choice.finish or index not in started:
            so_far = _usage([choice], [job]) if options.continuous_usage_stats else None
            usage = {"usage": so_far} if options.include_usage else {}
            for entry in form.format_chunks(index, text, lines, choice, index not in started):
                yield head | {"choices": [entry]} | usage
                started.add(index)
    if options.include_usage:
        yield head | {"choices": [], **_tail(choices)}


async def raise_cuts_as_errors(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream, and raise an error of the API where the stream is cut off.

    Args:
        chunks: The chunks of `stream_answer`.

    Raises:
        ApiError: If the server is stopping, or the client reads too slowly.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except Stopped as error:
        raise ApiError(503, "the server is stopping") from error
    except SlowConsumerError as error:  # the client may hear of it yet
        _LOG.warning("an answer was cut off: %s", error)
        raise ApiError(500, f"the answer was cut off: {error}") from error


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _tail(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return usage and metrics of an answer. A prompt counts once, however many texts follow it."""
    jobs = [choice.job for choice in choices if choice.job is not None]
    usage = _usage(choices, {tuple(job.prompt): job for job in jobs}.values())
    return {"usage": usage, "metrics": {"speculative_decoding": speculation_metrics([job.stats for job in jobs])}}


def summarize(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the facts that the log has of an answer, or of as much of it as was written before the client left."""
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
        "tokens_per_step": round(speculation_metrics([job.stats for job in jobs])["mean_acceptance_length"], 3),
        "finish": ",".join(choice.finish or "left" for choice in choices),
    }


def _usage(choices: Iterable[Choice], prompts: Collection[TokenSequence]) -> dict[str, Any]:
    """Return the usage so far. The tokens of `prompts` count as read, those of `choices` as written."""
    read, written = sum(len(job.prompt) for job in prompts), sum(choice.token_count for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(job.reused for job in prompts)},
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any]:
    """Return how speculation went, under vLLM's names (vllm-project/vllm#48915).

    Steps without drafts do not count. `mean_acceptance_length` counts the token that follows the accepted drafts too;
    entry j of `acceptance_histogram` counts the steps that accepted exactly j drafts; entry d of `acceptance_by_depth`,
    which vLLM lacks, is the share of the steps with d accepted drafts or more that accepted one more.

    Args:
        stats: Counts of each sequence.
    """
    steps, drafted, accepted = (
        sum(getattr(entry, name) for entry in stats) for name in ("steps", "drafted", "accepted")
    )
    depth = max((len(entry.accepted_by_depth) for entry in stats), default=0)
    reached = [steps, *(sum(entry.accepted_by_depth[d] for entry in stats) for d in range(depth))]
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
