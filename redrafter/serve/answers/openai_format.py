"""Format what the engine writes as OpenAI's answers, whole or as a stream."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from redrafter.errors import ReDrafterError
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import Choice, TokenLine
from redrafter.serve.answers.usage import count_usage, usage_and_metrics
from redrafter.serve.delta_stream import Stopped
from redrafter.serve.protocol.fields import StreamOptions
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["AnswerFormat", "collect_answer", "raise_cuts_as_errors", "stream_answer"]

_LOG = logging.getLogger(__name__)

# The index of a choice, its sequence, and what the sequence has gained.
Pieces = AsyncIterator[tuple[int, ServedSequence, list[SequenceDelta]]]


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


async def collect_answer(
    deltas: Pieces, choices: list[Choice], form: AnswerFormat, model: str, best: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Return a whole answer, once all its texts have ended.

    Args:
        deltas: What the sequences gain, until the last one has ended.
        choices: The texts; those of one prompt follow each other.
        form: Format of the answer.
        model: Name of the model, for the answer.
        best: Texts written after each prompt, and how many of them to keep: those whose tokens are likeliest.

    Raises:
        ApiError: If a sequence failed.
    """
    async for index, sequence, gained in deltas:
        choices[index].append(sequence, gained)
    written, kept = best
    if written == kept:
        chosen = choices
    else:
        chosen = [choice for group in _likeliest(choices, written, kept) for choice in group]

    def entries() -> list[dict[str, Any]]:
        return [form.format_choice(index, choice) for index, choice in enumerate(chosen)]

    # In a thread where prompts are scored: they may have many tokens.
    scored = any(choice.sequence is not None and choice.sequence.prompt_scores for choice in chosen)
    formatted = await asyncio.to_thread(entries) if scored else entries()
    return _head(form.kind, form.prefix, model) | {"choices": formatted, **usage_and_metrics(choices)}


def _likeliest(choices: Sequence[Choice], copies: int, keep: int) -> Iterator[list[Choice]]:
    """Yield of each prompt's `copies` texts the `keep` with the highest mean log-probability, the best first."""
    for begin in range(0, len(choices), copies):
        group = choices[begin : begin + copies]
        yield sorted(group, key=lambda choice: choice.logprob / max(choice.token_count, 1), reverse=True)[:keep]


async def stream_answer(
    deltas: Pieces, choices: list[Choice], form: AnswerFormat, model: str, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield an answer in chunks. With `include_usage`, a last chunk has the usage and no choices.

    Args:
        deltas: What the sequences gain, until the last one has ended.
        choices: The texts.
        form: Format of the answer.
        model: Name of the model, for the answer.
        options: The request's `stream_options`.

    Raises:
        ApiError: If a sequence failed.
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
    """Yield the chunks of a stream, and raise an error of the API where the stream is cut off.

    Args:
        chunks: The chunks of `stream_answer`.

    Raises:
        ApiError: If the server is stopping, the client reads too slowly, or a text cannot be told.
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
