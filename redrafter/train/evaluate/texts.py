"""Generate the texts on which drafting is measured: prompts, and a base's continuations with known seeds.

Prompts are cut to several lengths on the left, so that the base continues from the same token at each length and only
the preceding context differs.
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

TRAINING_TEXTS = 64  # maximum number of rows of the data to read, and of their windows to measure
FORM_PROMPTS = 30  # number of prompts measured both with and without the chat template

DEFAULT_BATCH_SIZE = 32  # texts written at once
# Settings of a generation config other than the temperature are disabled: measure the model's own distribution.
_NEUTRAL = {"repetition_penalty": 1.0}
_NEUTRAL_SAMPLING = {"top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Texts:
    """Texts that a base generated from prompts."""

    tokens: list[list[int]]  # token ids of each text, its prompt included
    prompt_lengths: list[int]  # tokens of each prompt
    ended: list[bool]  # whether an end token ended each text
    temperature: float = 0.0  # sampling temperature; 0 for greedy
    seeds: list[int] | None = None  # seed of each text; None for greedy

    @property
    def continuations(self) -> list[list[int]]:
        """The generated tokens of each text, without its prompt."""
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
    """Continue each prompt by plain decoding at a temperature, with all other sampling settings disabled.

    Prompt i, token ids, is continued by at most `new_tokens` tokens with `seed + i`; temperature 0 is greedy. `end_ids`
    end a text; None uses the generation config's. `batch_size` prompts are decoded at once, and `report` is
    called after each batch with the number of completed texts.
    """
    # Written without drafts, so that texts do not depend on the measured drafter.
    engine = Engine(target, PlainProposer(), options)
    ends = sorted(end_tokens(target.model) if end_ids is None else end_ids)
    # Sort by length to keep padding small; results are stored by the original index.
    tokens, order = list(map(list, prompts)), sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    settings: dict[str, Any] = _NEUTRAL | ({"eos_token_id": ends} if ends else {}) | {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= _NEUTRAL_SAMPLING | {"temperature": temperature}
    report(0)
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        # Seeds follow the prompt, not the batch, so that the batch size does not change texts.
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
    """A base's answers to the turns of a suite's questions; each turn's prompt includes all previous turns."""

    texts: Texts  # of all turns, category by category
    turns: dict[str, int]  # number of answered turns by category
    skipped: dict[str, int]  # number of turns by category whose prompts are too long


def answer_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    seed: int,
    write: Callable[[list[list[int]], int], Texts],
) -> SuiteTexts:
    """Answer all turns of a suite's questions, by category.

    Prompts have at most `most` tokens. `write(prompts, seed)` continues prompt i with `seed + i`; the seeds of all
    categories' turns count up from `seed`. Raises `ArgumentError` if no prompt is short enough.
    """
    parts: list[Texts] = []
    turns, skipped = dict[str, int](), dict[str, int]()
    for category, questions in suite.categories.items():
        dialogues, before = Dialogues(questions, tokenizer, most), sum(turns.values())
        turns[category] = 0
        # A turn's prompt contains the answers before it, so turns are generated one after another.
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
    """Return the fraction of n-grams that repeat an earlier n-gram of the same text.

    `texts` are token ids, and `size` is n. N-grams overlap: one starts at every token. Returns a value from 0 to 1 over
    all texts, or None if every text is shorter than `size`.
    """
    runs = [list(zip(*(text[offset:] for offset in range(size)), strict=False)) for text in texts]
    count = sum(map(len, runs))
    return (count - sum(len(set(text_runs)) for text_runs in runs)) / count if count else None


@dataclass(frozen=True)
class PromptChoice:
    """Prompts that the base continues."""

    categories: dict[str, int]  # number of prompts by category; the prompts are in this order
    # Token ids of the prompts by the length that they are cut to; None for whole prompts.
    by_length: dict[int | None, list[list[int]]]
    left_out: tuple[int, ...] = ()  # requested lengths that no prompt reaches
    longest: int | None = None  # tokens of the longest prompt if a length is left out, otherwise None

    @classmethod
    def whole(cls, prompts: dict[str, list[list[int]]]) -> "PromptChoice":
        """Create a choice of uncut prompts, given by category."""
        counts = {category: len(members) for category, members in prompts.items()}
        return cls(counts, {None: [ids for members in prompts.values() for ids in members]})


@dataclass(frozen=True)
class PromptSource:
    """Chooses prompts from files and cuts them.

    Methods raise `CheckpointError` naming a row that cannot be read.
    """

    files: Sequence[str]  # if empty, the prompts that ship with the package
    tokenizer: PreTrainedTokenizerBase  # of the base
    count: int | None = None  # prompts of each category, chosen by the seed; None for all
    seed: int = 0  # of the choice
    share: float = 1.0  # fraction of the tokens of a row of text to use as prompt
    most: int | None = None  # maximum number of tokens of a row of text to use as prompt

    def by_category(self, max_tokens: int) -> dict[str, list[list[int]]]:
        """Choose prompts of at most `max_tokens` tokens of each category.

        A category is the `source` of a row or else the name of its file. Returns the token ids of its prompts. Raises
        `ArgumentError` where no prompt is left.
        """
        chosen: dict[str, list[list[int]]] = {}
        for category, members in self._rows_by_category():
            limit = self.count or len(members)
            encoded = sample_prompts(
                members, self.tokenizer, limit, max_tokens, self.seed, text_share=self.share, max_text_tokens=self.most
            )
            chosen.setdefault(category, []).extend(encoded)
        chosen = {category: encoded[: self.count] for category, encoded in chosen.items() if encoded}
        if not chosen:
            raise ArgumentError(f"{self._names()}: no prompt of 1 to {max_tokens} tokens")
        return chosen

    def of_lengths(self, lengths: Sequence[int]) -> PromptChoice:
        """Choose prompts that have the maximum of some lengths, each 2 or more tokens, and cut them to every length.

        Lengths that no prompt reaches are left out. A row of text is first truncated on the right, to `most` or to the
        longest remaining length. Raises `ArgumentError` if no prompt has the shortest length.
        """
        found: dict[str, list[tuple[Row, int]]] = {}
        for category, rows in self._rows_by_category():
            # Rows are encoded one by one until there are enough, since long texts take time to tokenize.
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
            # All lengths end with the same tokens, so that only the left context differs.
            length: [cut_prompt(ids, length, bos) for ids in whole.by_length[None]]
            for length in kept
        }
        left_out = tuple(sorted(set(lengths) - set(kept)))
        return PromptChoice(whole.categories, by_length, left_out, longest if left_out else None)

    def in_both_forms(self, max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Encode some prompts both as plain text and as a user's turn, with at most `max_tokens` tokens.

        Returns token ids of the plain prompts, and of the same prompts in the template; none without a chat template.
        """
        plain, templated = list[list[int]](), list[list[int]]()
        if not self.tokenizer.chat_template:
            return plain, templated
        rows = [row for _, found in self._rows() for row in found]
        random.Random(self.seed).shuffle(rows)
        for row in rows:
            if len(plain) == FORM_PROMPTS:
                break
            if row.messages is not None:  # use the first user turn of a conversation
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
        """Yield the name of each file and its rows."""
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
    """Return the last `length` tokens of a prompt, keeping an initial BOS in place of the first one.

    `length` is from 2 to the length of the prompt; `bos` is the BOS id, or None.
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
    """Load some texts of a drafter's training data with the loaders of training.

    A drafter predicts greedy texts better than sampled ones, so only texts of equal temperature are comparable. Of rows
    that record it, such as rows of `redrafter regenerate`, only the highest one in `temperatures` is used.
    Other rows were not generated by a model; they are compared with texts at the temperature closest to 1.

    Args:
        files: Sources of the data.
        tokenizer: Tokenizer of the base.
        vocabulary: Ids that the base knows.
        context: Tokens of the base's context; None for no limit.
        seed: Seed of the choice of texts.
        temperatures: Temperatures of the base's texts that the data are compared with.

    Returns:
        Each trained part of a text, with everything before it as prompt, and with the temperature to compare with; and
        whether the rows record that temperature.

    Raises:
        ArgumentError: There is no row to train on, or none of these temperatures.
        CheckpointError: A row cannot be read or has no trained tokens.
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
    # A separate generator, so that other random draws do not change the choice.
    choice = random.Random(seed)
    choice.shuffle(rows)
    length = DEFAULT_LENGTH if context is None else min(DEFAULT_LENGTH, context)
    windows = Windows(encode_documents(rows[:TRAINING_TEXTS], tokenizer), length, tokenizer.bos_token_id, pack=False)
    windows.check(vocabulary, context)
    tokens, prompt_lengths = list[list[int]](), list[int]()
    for index in choice.sample(range(len(windows)), min(TRAINING_TEXTS, len(windows))):
        span = slice(int(windows.offsets[index]), int(windows.offsets[index + 1]))
        ids, end = windows.tokens[span].tolist(), 0
        # Each answer of a conversation is one text; what precedes it is its prompt.
        for learnt, run in groupby(windows.mask[span].tolist()):
            begin, end = end, end + len(list(run))
            if learnt:
                tokens.append(ids[:end])
                prompt_lengths.append(begin)
    return Texts(tokens, prompt_lengths, [False] * len(tokens), temperature), bool(recorded)
