"""Where a row ends."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

__all__ = ["cut", "first_stop"]


def cut(tokens: Tensor, accepted: Tensor, length: Tensor, limit: Tensor, eos: Tensor) -> tuple[Tensor, Tensor]:
    """How many of a step's tokens become output, and whether the row ends with the last of them.

    tokens: `[B, K+1]`, the first `accepted[b] + 1` of which are real. length: `[B]`, committed tokens before the step,
    so that token j makes the text `length + 2 + j` long. limit: `[B]`, its longest. eos: `[E]`. Returns `[B]` int64,
    bool.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens[:, :, None] == eos).any(dim=-1) | (length[:, None] + 2 + index >= limit[:, None])  # [B, K+1]
    first = torch.where(stops, index, tokens.shape[1]).amin(dim=1)
    return torch.minimum(first, accepted) + 1, first <= accepted


def first_stop(criterion: StoppingCriteria, text: Sequence[int], new: Sequence[int], pad: int) -> int | None:
    """Index of the first of `new` tokens after which `criterion` says stop, each asked about exactly the text up to it.

    text: the row before them, padding included. Hugging Face's stop strings look at a fixed number of last tokens, so
    all of `new` are asked at once; a user's own criterion is called once per token with ids `[1, L]` and no scores.
    """
    whole = [*text, *new]
    ends = range(len(text) + 1, len(whole) + 1)
    if type(criterion) is StopStringCriteria:
        reach = criterion.maximum_token_len
        tails = [[pad] * (reach - end) + whole[max(0, end - reach) : end] for end in ends]
        hits = criterion(torch.tensor(tails), None).tolist()
    else:
        hits = (bool(torch.as_tensor(criterion(torch.tensor([whole[:end]]), None)).all()) for end in ends)
    return next((index for index, hit in enumerate(hits) if hit), None)
