"""Log-probabilities of prompts as OpenAI's legacy completions tell them, and as vLLM does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer
from redrafter.scheduler.sequence import TokenSequence
from redrafter.serve.answers.text import text_of
from redrafter.serve.protocol.requests import ApiError

__all__ = ["PromptLine", "by_text", "check_scores", "prompt_lines", "prompt_logprobs"]

MOST_SCORES = 1 << 18  # log-probabilities of prompts in one answer, which may be 100 MB in memory


@dataclass(frozen=True)
class PromptLine:
    """One token of an echoed prompt. offset: characters of the echoed text before it. logprob, likeliest: None for the
    first token, which follows nothing."""

    text: str
    offset: int
    logprob: float | None
    likeliest: dict[str, float] | None


def check_scores(prompts: Sequence[Sequence[int]], count: int | None) -> None:
    """Refuse to tell more log-probabilities of prompts in one answer than `MOST_SCORES`.

    Args:
        prompts: the tokens of each text's prompt.
        count: how many of the likeliest tokens are told at each place; None for none of it.
    """
    if count is None:
        return
    scores = (count + 1) * sum(map(len, prompts))
    if scores > MOST_SCORES:
        raise ApiError(
            400,
            f"{scores} log-probabilities of prompts in one answer; at most {MOST_SCORES}: ask for fewer at each place, "
            "or for fewer or shorter prompts in a request",
            "prompt_logprobs",
        )


def prompt_lines(job: TokenSequence, count: int, tokenizer: PreTrainedTokenizerBase) -> list[PromptLine]:
    """Return a prompt's tokens with their log-probabilities and `count` of the likeliest at each place."""
    first, *others = job.prompt
    offsets = _offsets(job, tokenizer)
    lines = [PromptLine(text_of(tokenizer, [first]), next(offsets), None, None)]
    for token, own in zip(others, job.prompt_scores, strict=True):
        likeliest = dict(islice(own.likeliest.items(), count))
        top = by_text(likeliest, token, own.logprob, tokenizer)
        lines.append(PromptLine(text_of(tokenizer, [token]), next(offsets), own.logprob, top))
    return lines


def _offsets(job: TokenSequence, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield how long the text before each token of a prompt is, without special tokens, as it is echoed."""
    detokenizer, offset = Detokenizer(tokenizer), 0
    for token in job.prompt:
        yield offset
        offset += len(detokenizer.push([token]))


def by_text(
    likeliest: Mapping[int, float], token: int, logprob: float, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Return log-probabilities by the text of their tokens, the token that stands there among them.

    Where several tokens have one text, as parts of characters do, the others stand under `token_id:` and their ids.
    """
    own = text_of(tokenizer, [token])
    found = {own: logprob}
    for each, value in likeliest.items():
        if each != token:
            text = text_of(tokenizer, [each])
            found[f"token_id:{each}" if text in found else text] = value
    return found


def prompt_logprobs(job: TokenSequence, count: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any] | None]:
    """Return, in vLLM's shape, each token of a prompt and `count` of the likeliest at its place, by id; None for the
    first token, which follows nothing."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": text_of(tokenizer, [token])}

    told: list[dict[str, Any] | None] = [None]
    for token, own in zip(job.prompt[1:], job.prompt_scores, strict=True):
        ranked = enumerate(islice(own.likeliest.items(), count), 1)
        others = {f"{each}": entry(each, value, rank) for rank, (each, value) in ranked if each != token}
        told.append({f"{token}": entry(token, own.logprob, own.rank)} | others)
    return told
