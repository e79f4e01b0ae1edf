"""Where a row ends. On the host: the tokens of a step are read once anyway, and few rows end at any step."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

__all__ = ["cut", "end_tokens", "first_stop"]


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """The ids that end a text: the generation config's and, where a tokenizer is given, that one's, with which a chat
    model may end its turns though its base never did."""
    ends = model.generation_config.eos_token_id
    found = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id if tokenizer else None}
    return sorted(end for end in found if isinstance(end, int))


def cut(new: Sequence[int], room: int, eos: Collection[int]) -> tuple[list[int], bool]:
    """What of a step's tokens becomes output, and whether the row ends with the last of it.

    room: how many tokens the row may still come to, at least 1.
    """
    for index, token in enumerate(new):
        if token in eos or index + 1 == room:
            return list(new[: index + 1]), True
    return list(new), False


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
