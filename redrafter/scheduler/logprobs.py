"""Log-probabilities of a prompt's own tokens, from the forwards that read it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LEAST", "PromptScore", "score"]

LEAST = -9999.0  # log-probability that is told, as OpenAI has it: -inf is no JSON
NUMBERS = 1 << 23  # logits that are looked at at once: 32 MiB in float32


@dataclass(frozen=True)
class PromptScore:
    """What the model thought of one token of a prompt, after all the tokens before it.

    logprob: of the token itself. rank: its place among all tokens, 1 for the likeliest. likeliest: log-probabilities
    of the likeliest tokens at its place by id, the likeliest first.
    """

    logprob: float
    rank: int
    likeliest: Mapping[int, float]


def score(logits: Tensor, following: Sequence[int], count: int) -> Iterator[PromptScore]:
    """Score the tokens that follow the first ones that a forward read, some at a time.

    Args:
        logits: `[n, V]`, of n tokens one behind the other.
        following: the tokens behind these, n or fewer.
        count: how many of the likeliest tokens to tell at each place.
    """
    size = max(NUMBERS // logits.shape[1], 1)
    for begin in range(0, len(following), size):
        tokens = torch.tensor(following[begin : begin + size], device=logits.device)[:, None]
        scores = logits[begin : begin + len(tokens)].float().log_softmax(dim=-1)
        own = scores.gather(1, tokens)
        ranks = 1 + (scores > own).sum(dim=1)
        likeliest = scores.topk(count)
        told = (own[:, 0].clamp(min=LEAST), ranks, likeliest.indices, likeliest.values.clamp(min=LEAST))
        for logprob, rank, ids, values in zip(*(each.tolist() for each in told), strict=True):
            yield PromptScore(logprob, rank, dict(zip(ids, values, strict=True)))
