"""Format log-probabilities of prompts as OpenAI's completions do, and as vLLM does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer, decode_tokens
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.served_sequence import ServedSequence

__all__ = ["PromptLine", "by_text", "check_scores", "prompt_lines", "prompt_logprobs"]

MAX_SCORES = 1 << 18  # log-probabilities of prompts in one answer, which may be 100 MB in memory


@dataclass(frozen=True)
class PromptLine:
    """One token of an echoed prompt.

    Attributes:
        text: Text of the token.
        offset: Characters of the echoed text before it.
        logprob: Log-probability of the token; None for the first token, which follows nothing.
        likeliest: Log-probabilities of the likeliest tokens, by text; None for the first token.
    """

    text: str
    offset: int
    logprob: float | None
    likeliest: dict[str, float] | None


def check_scores(prompts: Sequence[Sequence[int]], count: int | None) -> None:
    """Check that one answer has at most `MAX_SCORES` log-probabilities of prompts.

    Args:
        prompts: Token ids of each text's prompt.
        count: How many of the likeliest tokens are listed beside each token; None for no log-probabilities.

    Raises:
        ApiError: If there are more.
    """
    if count is None:
        return
    scores = (count + 1) * sum(map(len, prompts))
    if scores > MAX_SCORES:
        raise ApiError(
            400,
            f"{scores} log-probabilities of prompts in one answer; at most {MAX_SCORES}: ask for fewer at each place, "
            "or for fewer or shorter prompts in a request",
            "prompt_logprobs",
        )


def prompt_lines(sequence: ServedSequence, count: int, tokenizer: PreTrainedTokenizerBase) -> list[PromptLine]:
    """Return a prompt's tokens with their log-probabilities and those of the `count` likeliest tokens beside each."""
    first, *others = sequence.prompt
    offsets = _offsets(sequence, tokenizer)
    lines = [PromptLine(decode_tokens(tokenizer, [first]), next(offsets), None, None)]
    for token, score in zip(others, sequence.prompt_scores, strict=True):
        likeliest = dict(islice(score.likeliest.items(), count))
        top = by_text(likeliest, token, score.logprob, tokenizer)
        lines.append(PromptLine(decode_tokens(tokenizer, [token]), next(offsets), score.logprob, top))
    return lines


def _offsets(sequence: ServedSequence, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield how many characters of the echoed text, which lacks special tokens, are before each token of a prompt."""
    detokenizer, offset = Detokenizer(tokenizer), 0
    for token in sequence.prompt:
        yield offset
        offset += len(detokenizer.push([token]))


def by_text(
    likeliest: Mapping[int, float], token: int, logprob: float, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Return log-probabilities by the text of their tokens.

    Where several tokens have one text, as parts of characters do, the keys of the others are `token_id:` and the id.

    Args:
        likeliest: Log-probabilities of the likeliest tokens, by id.
        token: Id of the token that was written, which is always among the returned ones.
        logprob: Its log-probability.
        tokenizer: The model's tokenizer.
    """
    logprobs = {decode_tokens(tokenizer, [token]): logprob}
    for other, value in likeliest.items():
        if other != token:
            text = decode_tokens(tokenizer, [other])
            logprobs[f"token_id:{other}" if text in logprobs else text] = value
    return logprobs


def prompt_logprobs(
    sequence: ServedSequence, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format.

    Args:
        sequence: A sequence whose prompt was scored.
        count: How many of the likeliest tokens are listed beside each token.
        tokenizer: The model's tokenizer.

    Returns:
        Of each token, entries by id for it and for the likeliest tokens; None for the first token, which follows
        nothing.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": decode_tokens(tokenizer, [token])}

    entries: list[dict[str, Any] | None] = [None]
    for token, score in zip(sequence.prompt[1:], sequence.prompt_scores, strict=True):
        ranked = enumerate(islice(score.likeliest.items(), count), 1)
        others = {f"{other}": entry(other, value, rank) for rank, (other, value) in ranked if other != token}
        entries.append({f"{token}": entry(token, score.logprob, score.rank)} | others)
    return entries
