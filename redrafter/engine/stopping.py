"""Where a row ends, decided on the host: it reads the tokens of a step anyway, and few rows end at any step."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria

__all__ = ["end_tokens", "first_stop"]


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the ids that end a text, in ascending order.

    Args:
        model: A Hugging Face model, whose generation config names some.
        tokenizer: Its tokenizer, with whose end token a chat model may end its turns though its base never did.
    """
    ends = model.generation_config.eos_token_id
    ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id if tokenizer else None}
    return sorted(end for end in ids if isinstance(end, int))


def first_stop(criterion: StoppingCriteria, text: Sequence[int], new: Sequence[int], pad: int) -> int | None:
    """Return the index of the first of `new` tokens after which `criterion` stops; None where it does not.

    Each token is asked about with exactly the text up to it. Hugging Face's stop strings look at a fixed number of last
    tokens, so all of `new` are asked at once; a user's own criterion is called once per token with ids `[1, L]` and no
    scores.

    Args:
        criterion: Hugging Face's, or a user's own.
        text: Tokens of the row before them, padding included.
        new: Tokens of the step.
        pad: Id that fills a text in front.
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
