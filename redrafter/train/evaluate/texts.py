"""The texts along which drafting is measured: prompts, and what a base writes from them under known seeds.

Where prompts are cut to several lengths, they are cut at their beginning, so that the base writes on from the same
token after each length, and only what is before it differs.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.documents import encode_documents
from redrafter.data.prompts import encode_prompt, sample_prompts
from redrafter.data.rows import Row, read_rows
from redrafter.data.windows import Windows
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.call import GenerateOutput
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import read_prompts
from redrafter.measure.run import padded
from redrafter.model.target import Target
from redrafter.train.config import DEFAULT_LENGTH

TRAINING_TEXTS = 64  # rows of the data that are read, and windows of them that are measured
FORM_PROMPTS = 8  # prompts that are measured with the chat template and without

DEFAULT_BATCH_SIZE = 32  # texts written at once
# What a generation config may ask for beside a temperature, left off: a measurement is of the model's own distribution.
_NEUTRAL = {"repetition_penalty": 1.0}
_NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Texts:
    """Texts that a base wrote from some prompts."""

    tokens: list[list[int]]  # token ids of each text, its prompt included
    prompt_lengths: list[int]  # tokens of each prompt
    ended: list[bool]  # whether an end token ended each text
    temperature: float = 0.0  # temperature that they were written at; 0 for greedy
    seeds: list[int] | None = None  # seed of each text; None for greedy

    @property
    def continuations(self) -> list[list[int]]:
        """What the base wrote, without the prompts."""
        return [text[length:] for text, length in zip(self.tokens, self.prompt_lengths, strict=True)]


def write_texts(
    target: Target,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    end_ids: Collection[int] | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    options: EngineOptions | None = None,
    report: Callable[[int], object] = lambda done: None,
) -> Texts:
    """Let the base continue each prompt by plain decoding, at a temperature and under no other setting.

    Args:
        target: The base.
        prompts: Token ids of each prompt.
        new_tokens: Tokens written after each prompt, at most.
        temperature: Temperature; 0 for greedy.
        seed: Prompt i is continued under `seed + i`.
        end_ids: Ids that end a text; those of the generation config when None.
        batch_size: Prompts decoded at once.
        options: Options of the engine.
        report: Called after each batch with the number of texts that are done.
    """
    engine = Engine(target, PlainProposer(), options)
    ends = sorted(end_tokens(target.model) if end_ids is None else end_ids)
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        ids, mask = padded([prompts[index] for index in indices], pad_token=0)  # [B, P]
        seeds = [seed + index for index in indices] if temperature > 0 else None
        out = engine.generate(
            ids, mask, max_new_tokens=new_tokens, seed=seeds, return_dict_in_generate=True, **settings
        )
        assert isinstance(out, GenerateOutput)
        assert out.stats is not None
        new = out.sequences[:, ids.shape[1] :].tolist()
        for index, text, row in zip(indices, new, out.stats.rows, strict=True):
            tokens[index] += text[: 1 + row.emitted]  # the prefill's token is not counted as a step's
        report(first + len(indices))
    all_seeds = list(range(seed, seed + len(prompts))) if temperature > 0 else None
    return Texts(tokens, list(map(len, prompts)), [text[-1] in ends for text in tokens], temperature, all_seeds)


def repeated_share(texts: Sequence[list[int]], size: int) -> float | None:
    """Return the share of n-grams that repeat an earlier n-gram of the same text.

    `texts` holds token ids, and `size` is the length n in tokens. N-grams overlap: one begins at every token.

    Returns:
        Repeats in all texts, divided by n-grams in all texts, from 0 to 1; None if every text is shorter than `size`.
    """
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(text_runs)) for text_runs in runs)) / count if count else None


def prompts_by_category(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    max_tokens: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> dict[str, list[list[int]]]:
    """Choose prompts of each category: the `source` of a row or else the name of its file.

    Args:
        files: Files of prompts; the prompts that ship with the package if there are none.
        tokenizer: Tokenizer of the model.
        count: Prompts of each category, chosen by the seed; None for all.
        max_tokens: Tokens of a prompt; longer prompts are left out.
        seed: Seed of the choice.
        share: Share of the tokens of a row of text that is its prompt.
        most: Tokens of a row of text that are its prompt, at most.

    Returns:
        Token ids of the prompts, by category.

    Raises:
        ArgumentError: No prompt is left.
        CheckpointError: A row cannot be read; the message names it.
    """
    chosen: dict[str, list[list[int]]] = {}
    for category, members in _by_category(files):
        limit = count or len(members)
        encoded = sample_prompts(members, tokenizer, limit, max_tokens, seed, text_share=share, max_text_tokens=most)
        chosen.setdefault(category, []).extend(encoded)
    chosen = {category: encoded[:count] for category, encoded in chosen.items() if encoded}
    if not chosen:
        raise ArgumentError(f"{_name_files(files)}: no prompt of 1 to {max_tokens} tokens")
    return chosen


def _read(files: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Read the rows of each file of prompts; of those that ship with the package if there is none."""
    sources: Sequence[str | None] = files or [None]
    for file in sources:
        yield Path(file or "prompts").name.split(".")[0], read_prompts(file)


def _by_category(files: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each category of each file."""
    for name, found in _read(files):
        rows: dict[str, list[Row]] = {}
        for row in found:
            rows.setdefault(row.source or name, []).append(row)
        yield from rows.items()


def _name_files(files: Sequence[str]) -> str:
    return ", ".join(files) or "the prompts that ship"


@dataclass(frozen=True)
class PromptChoice:
    """Prompts that the base writes on from."""

    categories: dict[str, int]  # number of prompts of each category; the prompts stand in the order of the categories
    # Token ids of the prompts, by the length that they are cut to; of whole prompts under None.
    by_length: dict[int | None, list[list[int]]]
    left_out: tuple[int, ...] = ()  # lengths that no prompt has
    longest: int | None = None  # tokens of the longest prompt, if a length is left out; else None

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
    for category, rows in _by_category(files):
        random.Random(seed).shuffle(rows)
        remaining = len(rows) if count is None else count
        for row in rows:
            if not remaining:
                break
            tokens = len(encode_prompt(row, tokenizer, text_share=share, max_text_tokens=most))
            found.setdefault(category, []).append((row, tokens))
            remaining -= tokens >= max(lengths)
    longest = max(tokens for members in found.values() for _, tokens in members)
    kept = sorted({length for length in lengths if length <= longest})
    if not kept:
        raise ArgumentError(
            f"--prompt-lengths {min(lengths)}: no prompt of {_name_files(files)} has as many tokens, the longest has "
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


def read_training_texts(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocabulary: int, context: int | None, seed: int
) -> Texts:
    """Read some texts of a drafter's training data, as training reads them.

    `context` is the number of tokens of the base's context; None for no limit.

    Returns:
        Each part of a text that is learnt, with all before it as its prompt.

    Raises:
        ArgumentError: There is no row to train on.
        CheckpointError: A row cannot be read or teaches nothing.
        MismatchError: A row has ids of another tokenizer.
    """
    rows = [row for row in read_rows(files) if row.split in (None, "train")]
    if not rows:
        raise ArgumentError(f"--data {' '.join(files)}: no row to train on; rows of split val and test are not")
    choice = random.Random(seed)
    choice.shuffle(rows)
    length = DEFAULT_LENGTH if context is None else min(DEFAULT_LENGTH, context)
    windows = Windows(encode_documents(rows[:TRAINING_TEXTS], tokenizer), length, tokenizer.bos_token_id, pack=False)
    windows.check(vocabulary, context)
    tokens, prompt_lengths = list[list[int]](), list[int]()
    for index in choice.sample(range(len(windows)), min(TRAINING_TEXTS, len(windows))):
        span = slice(int(windows.offsets[index]), int(windows.offsets[index + 1]))
        ids, end = windows.tokens[span].tolist(), 0
        for learnt, run in groupby(windows.mask[span].tolist()):
            begin, end = end, end + len(list(run))
            if learnt:
                tokens.append(ids[:end])
                prompt_lengths.append(begin)
    return Texts(tokens, prompt_lengths, [False] * len(tokens))


def prompts_in_both_forms(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Encode some prompts as plain text and as a user's turn of the chat template.

    Args:
        files: Files of prompts; the prompts that ship with the package if there are none.
        tokenizer: The base's tokenizer.
        max_tokens: Tokens of a prompt in either form; longer prompts are left out.
        seed: Seed of the choice.
        share: Share of the tokens of a row of text that is its prompt.
        most: Tokens of a row of text that are its prompt, at most.

    Returns:
        Token ids of the plain prompts, and of the same prompts in the template; none without a chat template.

    Raises:
        CheckpointError: A row cannot be read, or the template fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        return [], []
    rows = [row for _, found in _read(files) for row in found]
    random.Random(seed).shuffle(rows)
    plain, templated = list[list[int]](), list[list[int]]()
    for row in rows:
        if len(plain) == FORM_PROMPTS:
            break
        if row.messages is not None:  # of a conversation, the first user's turn
            text = next((turn["content"] for turn in row.messages if turn["role"] == "user"), "")
        else:
            ids = encode_prompt(row, tokenizer, text_share=share, max_text_tokens=most)
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
        turn = Row(row.where, messages=[{"role": "user", "content": text}])
        forms = [encode_prompt(form, tokenizer) for form in (Row(row.where, text=text), turn)]
        if all(0 < len(ids) <= max_tokens for ids in forms):
            plain.append(forms[0])
            templated.append(forms[1])
    return plain, templated
