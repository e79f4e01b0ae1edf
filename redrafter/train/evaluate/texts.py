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

from redrafter.app.flags import format_value
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.data.documents import encode_documents
from redrafter.data.prompts import encode_prompt, sample_prompts
from redrafter.data.rows import Row, read_rows
from redrafter.data.suites import Dialogues, Suite
from redrafter.data.windows import Windows
from redrafter.drafting.proposer import PlainProposer
from redrafter.engine.engine import Engine
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import read_prompts
from redrafter.measure.run import timed_run
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

    Prompt i, token ids, is continued by at most `new_tokens` tokens under `seed + i`; temperature 0 is greedy.
    `end_ids` end a text; those of the generation config when None. `batch_size` prompts are decoded at once, and
    `report` is called after each batch with the number of texts that are done.
    """
    engine = Engine(target, PlainProposer(), options)
    ends = sorted(end_tokens(target.model) if end_ids is None else end_ids)
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        seeds = [seed + index for index in indices] if temperature > 0 else None
        batch = [prompts[index] for index in indices]
        run = timed_run(engine, batch, 0, max_new_tokens=new_tokens, seed=seeds, **settings)
        for index, text in zip(indices, run.tokens, strict=True):
            tokens[index] += text
        report(first + len(indices))
    all_seeds = list(range(seed, seed + len(prompts))) if temperature > 0 else None
    return Texts(tokens, list(map(len, prompts)), [text[-1] in ends for text in tokens], temperature, all_seeds)


@dataclass(frozen=True)
class SuiteTexts:
    """What a base answered to the questions of a suite, turn by turn; each turn's text has all before it as prompt."""

    texts: Texts  # of all turns, category by category
    turns: dict[str, int]  # that were answered, by category
    skipped: dict[str, int]  # turns that were not asked, because their prompts are too long


def answer_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    seed: int,
    write: Callable[[list[list[int]], int], Texts],
) -> SuiteTexts:
    """Let a base answer the questions of a suite, by category, all of their turns.

    Prompts have at most `most` tokens. `write` continues some prompts, the i-th under the seed that it is given plus i;
    the turns of all categories count up from `seed`. Raises `ArgumentError` where no prompt is short enough.
    """
    parts: list[Texts] = []
    turns, skipped = dict[str, int](), dict[str, int]()
    for category, questions in suite.categories.items():
        dialogues, before = Dialogues(questions, tokenizer, most), sum(turns.values())
        turns[category] = 0
        while prompts := dialogues.next_prompts():
            parts.append(write(prompts, seed + before + turns[category]))
            turns[category] += len(prompts)
            dialogues.answer(parts[-1].continuations)
        skipped[category] = dialogues.skipped
    if not parts:
        raise ArgumentError(f"--suite: no turn has a prompt of at most {most} tokens, which the model's context leaves")
    seeds = [one for part in parts for one in part.seeds or ()]
    return SuiteTexts(
        Texts(
            [text for part in parts for text in part.tokens],
            [length for part in parts for length in part.prompt_lengths],
            [ended for part in parts for ended in part.ended],
            parts[0].temperature,
            seeds or None,
        ),
        turns,
        skipped,
    )


def repeated_share(texts: Sequence[list[int]], size: int) -> float | None:
    """Return the share of n-grams that repeat an earlier n-gram of the same text.

    `texts` holds token ids, and `size` is the length n in tokens. N-grams overlap: one begins at every token. Returns
    repeats in all texts, divided by n-grams in all texts, from 0 to 1; None if every text is shorter than `size`.
    """
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(text_runs)) for text_runs in runs)) / count if count else None


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


@dataclass(frozen=True)
class PromptSource:
    """Files of prompts, and how prompts are chosen and cut from them.

    Its methods raise `CheckpointError` for a row that cannot be read; the message names it.
    """

    files: Sequence[str]  # the prompts that ship with the package if there are none
    tokenizer: PreTrainedTokenizerBase  # of the base
    count: int | None = None  # prompts of each category, chosen by the seed; None for all
    seed: int = 0  # of the choice
    share: float = 1.0  # share of the tokens of a row of text that is its prompt
    most: int | None = None  # tokens of a row of text that are its prompt, at most

    def by_category(self, max_tokens: int) -> dict[str, list[list[int]]]:
        """Choose prompts of at most `max_tokens` tokens of each category.

        A category is the `source` of a row or else the name of its file. Returns the token ids of its prompts. Raises
        `ArgumentError` where no prompt is left.
        """
        chosen: dict[str, list[list[int]]] = {}
        cut: dict[str, Any] = {"text_share": self.share, "max_text_tokens": self.most}
        for category, members in self._rows_by_category():
            limit = self.count or len(members)
            encoded = sample_prompts(members, self.tokenizer, limit, max_tokens, self.seed, **cut)
            chosen.setdefault(category, []).extend(encoded)
        chosen = {category: encoded[: self.count] for category, encoded in chosen.items() if encoded}
        if not chosen:
            raise ArgumentError(f"{self._names()}: no prompt of 1 to {max_tokens} tokens")
        return chosen

    def of_lengths(self, lengths: Sequence[int]) -> PromptChoice:
        """Choose prompts that have the longest of some lengths, 2 or more tokens, and cut each to all of the lengths.

        Lengths that no prompt has are left out. A row of text is first cut at its end to the longest length that is
        left, unless `most` says where: its longest prompt is then its beginning. Raises `ArgumentError` where no prompt
        has the shortest length.
        """
        found: dict[str, list[tuple[Row, int]]] = {}
        for category, rows in self._rows_by_category():
            random.Random(self.seed).shuffle(rows)
            remaining = len(rows) if self.count is None else self.count
            for row in rows:
                if not remaining:
                    break
                tokens = len(self._encode(row, self.most))
                found.setdefault(category, []).append((row, tokens))
                remaining -= tokens >= max(lengths)
        longest = max(tokens for members in found.values() for _, tokens in members)
        kept = sorted({length for length in lengths if length <= longest})
        if not kept:
            raise ArgumentError(
                f"--prompt-lengths {min(lengths)}: no prompt of {self._names()} has as many tokens, the longest has "
                f"{longest}"
            )
        end = kept[-1] if self.most is None else self.most
        long_enough = {name: [row for row, tokens in some if tokens >= kept[-1]] for name, some in found.items()}
        whole = PromptChoice.whole(
            {name: [self._encode(row, end) for row in rows[: self.count]] for name, rows in long_enough.items() if rows}
        )
        bos = self.tokenizer.bos_token_id
        by_length: dict[int | None, list[list[int]]] = {
            length: [cut_prompt(ids, length, bos) for ids in whole.by_length[None]] for length in kept
        }
        left_out = tuple(sorted(set(lengths) - set(kept)))
        return PromptChoice(whole.categories, by_length, left_out, longest if left_out else None)

    def in_both_forms(self, max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Encode some prompts as plain text and as a user's turn of the chat template, `max_tokens` tokens at most.

        Returns token ids of the plain prompts, and of the same prompts in the template; none without a chat template.
        """
        plain, templated = list[list[int]](), list[list[int]]()
        if not getattr(self.tokenizer, "chat_template", None):
            return plain, templated
        rows = [row for _, found in self._rows() for row in found]
        random.Random(self.seed).shuffle(rows)
        for row in rows:
            if len(plain) == FORM_PROMPTS:
                break
            if row.messages is not None:  # of a conversation, the first user's turn
                text = next((turn["content"] for turn in row.messages if turn["role"] == "user"), "")
            else:
                text = str(self.tokenizer.decode(self._encode(row, self.most), skip_special_tokens=True))
            turn = Row(row.where, messages=[{"role": "user", "content": text}])
            forms = [encode_prompt(form, self.tokenizer) for form in (Row(row.where, text=text), turn)]
            if all(0 < len(ids) <= max_tokens for ids in forms):
                plain.append(forms[0])
                templated.append(forms[1])
        return plain, templated

    def _encode(self, row: Row, most: int | None) -> list[int]:
        return encode_prompt(row, self.tokenizer, text_share=self.share, max_text_tokens=most)

    def _rows(self) -> Iterator[tuple[str, list[Row]]]:
        """Read the rows of each file, after its name."""
        sources: Sequence[str | None] = self.files or [None]
        for file in sources:
            yield Path(file or "prompts").name.split(".")[0], read_prompts(file)

    def _rows_by_category(self) -> Iterator[tuple[str, list[Row]]]:
        for name, found in self._rows():
            rows: dict[str, list[Row]] = {}
            for row in found:
                rows.setdefault(row.source or name, []).append(row)
            yield from rows.items()

    def _names(self) -> str:
        return ", ".join(self.files) or "the prompts that ship"


def cut_prompt(ids: list[int], length: int, bos: int | None) -> list[int]:
    """Return the last `length` tokens of a prompt, with the BOS that it begins with in place of the first of them.

    `length`, 2 or more, is at most that of the prompt; `bos` is the id that begins a text; None for none.
    """
    first = ids[:1] if ids[0] == bos else []
    return first + ids[len(ids) - length + len(first) :]


def read_training_texts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    context: int | None,
    seed: int,
    temperatures: Collection[float],
) -> tuple[Texts, bool]:
    """Read some texts of a drafter's training data, as training reads them.

    A drafter guesses greedy texts more often than sampled ones, so only texts of one temperature compare. Of rows that
    record theirs, as `redrafter regenerate` writes them, those of the highest one that is among `temperatures` are
    read. Other rows were not drawn from a model, and compare with its texts at the temperature that is nearest to 1.

    Args:
        files: Sources of the data.
        tokenizer: Tokenizer of the base.
        vocabulary: Ids that the base knows.
        context: Tokens of the base's context; None for no limit.
        seed: Seed of the choice of texts.
        temperatures: Temperatures of the base's own texts that they are compared with.

    Returns:
        Each part of a text that is learnt, with all before it as its prompt, at the temperature of the texts that they
        compare with; and whether the rows record that temperature.

    Raises:
        ArgumentError: There is no row to train on, or none of these temperatures.
        CheckpointError: A row cannot be read or teaches nothing.
        MismatchError: A row has ids of another tokenizer.
    """
    rows = [row for row in read_rows(files) if row.split in (None, "train")]
    if not rows:
        raise ArgumentError(f"--data {' '.join(files)}: no row to train on; rows of split val and test are not")
    recorded = {row.temperature for row in rows if row.temperature is not None}
    comparable = recorded & set(temperatures)
    if recorded and not comparable:
        raise ArgumentError(
            f"--data {' '.join(files)} was written at temperature {' or '.join(f'{t:g}' for t in sorted(recorded))}, "
            f"and compares with texts of the same one: add it to --temperatures {format_value(tuple(temperatures))}"
        )
    temperature = max(comparable) if recorded else min(temperatures, key=lambda value: abs(value - 1))
    rows = [row for row in rows if not recorded or row.temperature == temperature]
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
    return Texts(tokens, prompt_lengths, [False] * len(tokens), temperature), bool(recorded)
