"""The prompts of an evaluation: whole ones, or the same ones cut to several lengths.

A prompt is cut at its beginning, so that the base writes on from the same token after each length, and only what stands
before it differs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from redrafter.data.prompts import encode_prompt
from redrafter.data.rows import Row
from redrafter.errors import ArgumentError
from redrafter.train.evaluate.prompts import name_files, rows_by_category

__all__ = ["PromptChoice", "cut_prompt", "prompts_of_lengths"]


@dataclass(frozen=True)
class PromptChoice:
    """Prompts that the base writes on from.

    Attributes:
        categories: Number of prompts of each category; the prompts stand in the order of the categories.
        by_length: Token ids of the prompts, by the length that they are cut to; of whole prompts under None.
        left_out: Lengths that no prompt has.
        longest: Tokens of the longest prompt, if a length is left out; else None.
    """

    categories: dict[str, int]
    by_length: dict[int | None, list[list[int]]]
    left_out: tuple[int, ...] = ()
    longest: int | None = None

    @classmethod
    def whole(cls, prompts: dict[str, list[list[int]]]) -> "PromptChoice":
        """Return the choice of prompts, given by category, without cutting them."""
        counts = {category: len(members) for category, members in prompts.items()}
        return cls(counts, {None: [ids for members in prompts.values() for ids in members]})


def prompts_of_lengths(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    count: int | None,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> PromptChoice:
    """Choose prompts that have the longest of some lengths, and cut each of them to all of the lengths.

    Lengths that no prompt has are left out. A row of text is first cut at its end to the longest length that is left,
    unless `most` says where: its longest prompt is then its beginning.

    Args:
        files: Files of prompts; the prompts that ship with the package if there are none.
        tokenizer: Tokenizer of the model.
        lengths: Tokens of a prompt, 2 or more.
        count: Prompts of each category, chosen by the seed; None for all.
        seed: Seed of the choice.
        share: Share of the tokens of a row of text that is its prompt.
        most: Tokens of a row of text that are its prompt, at most.

    Raises:
        ArgumentError: No prompt has the shortest length.
        CheckpointError: A row cannot be read; the message names it.
    """
    found: dict[str, list[tuple[Row, int]]] = {}
    sources: Sequence[str | None] = files or [None]
    for file in sources:
        for category, rows in rows_by_category(file).items():
            random.Random(seed).shuffle(rows)
            sized = _measure_rows(rows, tokenizer, count, max(lengths), share, most)
            found.setdefault(category, []).extend(sized)
    longest = max(tokens for members in found.values() for _, tokens in members)
    kept = sorted({length for length in lengths if length <= longest})
    if not kept:
        raise ArgumentError(
            f"--prompt-lengths {min(lengths)}: no prompt of {name_files(files)} has as many tokens, the longest has "
            f"{longest}"
        )
    end = kept[-1] if most is None else most
    long_enough = {name: [row for row, tokens in members if tokens >= kept[-1]] for name, members in found.items()}
    whole = PromptChoice.whole(
        {
            category: [encode_prompt(row, tokenizer, text_share=share, max_text_tokens=end) for row in rows[:count]]
            for category, rows in long_enough.items()
            if rows
        }
    )
    by_length: dict[int | None, list[list[int]]] = {
        length: [cut_prompt(ids, length, tokenizer.bos_token_id) for ids in whole.by_length[None]] for length in kept
    }
    left_out = tuple(sorted({length for length in lengths if length > longest}))
    return PromptChoice(whole.categories, by_length, left_out, longest if left_out else None)


def cut_prompt(ids: list[int], length: int, bos: int | None) -> list[int]:
    """Return the last `length` tokens of a prompt, with the BOS that it begins with in place of the first of them.

    Args:
        ids: Token ids of the prompt, `length` or more.
        length: Tokens that are left, 2 or more.
        bos: Id that begins a text; None for none.
    """
    first = ids[:1] if ids[0] == bos else []
    return first + ids[len(ids) - length + len(first) :]


def _measure_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    enough: int,
    share: float,
    most: int | None,
) -> list[tuple[Row, int]]:
    """Return rows with the number of tokens of their prompts, up to the row with which `count` of them have enough."""
    sized: list[tuple[Row, int]] = []
    remaining = len(rows) if count is None else count
    for row in rows:
        if not remaining:
            break
        tokens = len(encode_prompt(row, tokenizer, text_share=share, max_text_tokens=most))
        sized.append((row, tokens))
        remaining -= tokens >= enough
    return sized
