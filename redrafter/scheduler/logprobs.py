"""Log-probabilities of a sequence's tokens, and of the likeliest tokens at their positions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.cache.to_device import to_device

MIN_LOGPROB = -9999.0  # lowest log-probability reported, as in OpenAI's API: -inf is no JSON
MAX_LOGITS_AT_ONCE = 1 << 23  # logits scored at once: 32 MiB in float32


@dataclass(frozen=True)
class PromptScore:
    """Scores of one token of a prompt, given all the tokens before it.

    Attributes:
        logprob: Log-probability of the token.
        likeliest: Log-probabilities of the likeliest tokens at its position by id, the likeliest first.
    """

    logprob: float
    likeliest: Mapping[int, float]


def score_prompt(logits: Tensor, following: Sequence[int], count: int) -> Iterator[PromptScore]:
    """Score prompt tokens with the logits of the tokens before them.

    Args:
        logits: Logits of n successive prompt tokens, `[n, V]`.
        following: Tokens that follow these, n or fewer.
        count: How many of the likeliest tokens to report at each position.
    """
    tokens = to_device(following, logits.device, torch.long)
    nodes = torch.arange(len(tokens), device=tokens.device)
    values, ids = score_drawn(logits[None], torch.zeros_like(nodes), nodes, tokens, count)
    for (logprob, *likeliest), names in zip(values.tolist(), ids.tolist(), strict=True):
        yield PromptScore(logprob, dict(zip(names, likeliest, strict=True)))


def score_drawn(logits: Tensor, rows: Tensor, nodes: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Score T tokens that rows have drawn, without waiting for the device.

    Args:
        logits: Logits of the target before any processor at every node of all rows, `[B, N, V]`.
        rows: The row of each token, `[T]` int64.
        nodes: The node from which it was drawn, `[T]` int64.
        tokens: The tokens, `[T]` int64; an invalid id gets the scores of a valid one.
        count: How many of the likeliest tokens to report at each position.

    Returns:
        Log-probabilities of each token and, after it, of the likeliest ones, `[T, 1 + count]` float32, and the ids of
        these, `[T, count]` int64.
    """
    vocabulary, parts = logits.shape[-1], []
    # In pieces, as float32 copies of all rows' logits may be gigabytes with a large vocabulary.
    size = max(MAX_LOGITS_AT_ONCE // vocabulary, 1)
    for row, node, token in zip(*(x.split(size) for x in (rows, nodes, tokens.clamp(0, vocabulary - 1))), strict=True):
        scores = logits[row, node].float().log_softmax(dim=-1)  # [t, V]
        top = scores.topk(min(count, vocabulary))
        parts.append((torch.cat([scores.gather(1, token[:, None]), top.values], dim=1), top.indices))
    values, ids = (torch.cat(part) for part in zip(*parts, strict=True))
    return values.clamp(min=MIN_LOGPROB), ids
