"""Encode rows as prompts, which a base is to write on from."""

import random
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from redrafter.data.encoding import apply_template, check_tokenizer, encode_texts
from redrafter.data.rows import Row

__all__ = ["encode_prompt", "sample_prompts"]


def sample_prompts(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    max_tokens: int,
    seed: int,
    *,
    text_share: float = 1.0,
    max_text_tokens: int | None = None,
) -> list[list[int]]:
    """Return the prompts of randomly chosen rows. Rows whose prompts are empty or too long are passed over.

    Args:
        rows: Rows to choose from.
        tokenizer: The base's tokenizer.
        count: Most prompts to return.
        max_tokens: Most tokens of a prompt.
        seed: Seed of the shuffle.
        text_share: As for `encode_prompt`.
        max_text_tokens: As for `encode_prompt`.

    Returns:
        Token ids of each prompt.

    Raises:
        CheckpointError: If a row cannot be encoded.
        MismatchError: If a row has ids of another tokenizer.
    """
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    prompts: list[list[int]] = []
    for row in shuffled:
        if len(prompts) == count:
            break
        ids = encode_prompt(row, tokenizer, text_share=text_share, max_text_tokens=max_text_tokens)
        if 0 < len(ids) <= max_tokens:
            prompts.append(ids)
    return prompts


def encode_prompt(
    row: Row, tokenizer: PreTrainedTokenizerBase, *, text_share: float = 1.0, max_text_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a row's prompt; none where the row has no prompt.

    The prompt of a conversation is all before the assistant's first answer, or with the first user turn where there is
    no answer. The prompt of token ids is all before the first one to be learnt. The prompt of a text, or of ids where
    fewer than two come before the first one to be learnt, is their beginning.

    Args:
        row: A row of data.
        tokenizer: The base's tokenizer.
        text_share: Share of a text's tokens that is its prompt, rounded down.
        max_text_tokens: Most tokens of a text's prompt; None for no limit.

    Raises:
        CheckpointError: If the row cannot be encoded.
        MismatchError: If the row has ids of another tokenizer.
    """
    check_tokenizer(row, tokenizer)
    if row.messages is not None:
        roles = [turn["role"] for turn in row.messages]
        after_user = roles.index("user") + 1 if "user" in roles else 0
        stop = roles.index("assistant", 1) if "assistant" in roles[1:] else after_user
        if stop == 0:
            return []
        text = apply_template(row, row.messages[:stop], tokenizer, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if row.prompt is not None:
        return list(encode_texts([(row, row.prompt)], tokenizer)[0][0])
    if row.text == "":
        return []
    ids = row.ids if row.ids is not None else encode_texts([(row, row.text or "")], tokenizer)[0][0]
    mask = row.loss_mask or [True]
    first = mask.index(True) if True in mask else len(mask)
    return list(ids[:first] if first > 1 else ids[: int(len(ids) * text_share)][:max_text_tokens])
