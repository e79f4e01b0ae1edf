"""Log-probabilities of prompt tokens and of new tokens, from the logits of the forwards that read or drew them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_LOGPROB = -9999.0  # lowest log-probability reported, as in OpenAI's API: -inf is no JSON
MAX_LOGITS_AT_ONCE = 1 << 23  # logits scored at once: 32 MiB in float32


@dataclass(frozen=True)
class PromptScore:
    """What the model gave one token of a prompt, after all the tokens before it.

    Attributes:
        logprob: Log-probability of the token.
        rank: Rank of the token among all tokens, 1 for the likeliest.
        likeliest: Log-probabilities of the likeliest tokens at its position by id, the likeliest first.
    """

    logprob: float
    rank: int
    likeliest: Mapping[int, float]


def score_prompt(logits: Tensor, following: Sequence[int], count: int) -> Iterator[PromptScore]:
    """Score the tokens of a prompt that follow those that a forward read.

    Args:
        logits: Logits of n successive prompt tokens, `[n, V]`.
        following: Tokens that follow these, n or fewer.
        count: How many of the likeliest tokens to report at each position.
    """
    size = max(MAX_LOGITS_AT_ONCE // logits.shape[1], 1)
    for begin in range(0, len(following), size):
        tokens = torch.tensor(following[begin : begin + size], device=logits.device)[:, None]  # [n, 1]
        scores = logits[begin : begin + len(tokens)].float().log_softmax(dim=-1)  # [n, V]
        logprobs = scores.gather(1, tokens)  # [n, 1]
        ranks = 1 + (scores > logprobs).sum(dim=1)  # [n]
        top = scores.topk(count)  # [n, count]
        columns = (logprobs[:, 0].clamp(min=MIN_LOGPROB), ranks, top.indices, top.values.clamp(min=MIN_LOGPROB))
        for logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True):
            yield PromptScore(logprob, rank, dict(zip(ids, values, strict=True)))


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int | None) -> list[tuple[float, dict[int, float]]]:
    """Return the log-probability of each new token under the model, and the likeliest tokens at its position.

    Args:
        logits: Logits of the target before any processor, `[n, V]`, at the position before each token.
        tokens: The tokens that were drawn, n or fewer.
        count: How many of the likeliest tokens to report; 0 or None for none.
    """
    scores = logits[: len(tokens)].float().log_softmax(dim=-1).clamp(min=MIN_LOGPROB)  # [n, V]
    logprobs = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(count or 1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    likeliest = [dict(zip(ids, values, strict=True)) if count else {} for ids, values in pairs]
    return list(zip(logprobs, likeliest, strict=True))
