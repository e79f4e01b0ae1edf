"""A row of a data set as a task for the base: the prompt before each of its answers, and the answers.

The chat template is rendered with a marker in place of every answer, so that the text that it puts after an answer is
found whatever it would do to the answer itself. The ids of an answer are kept as the base wrote them, between those of
the template: the next answer is decoded after exactly the ids that the base saw and wrote before.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.data.prompts import encode_prompt
from redrafter.data.rows import Row, fingerprint
from redrafter.errors import CheckpointError, MismatchError, first_line

__all__ = ["BaseLimits", "Task", "ids_behind", "make_task"]

MIN_BEGINNING_TOKENS, MAX_BEGINNING_TOKENS = 16, 64  # of a plain text, the tokens that are its prompt
BEGINNING_CHARS = 8192  # characters of a plain text that are read for them
MARKER = "AnswerOfTheBase"
SEED_RANGE = 1 << 62  # seeds are less than this


@dataclass(frozen=True)
class BaseLimits:
    """Limits of a base.

    Attributes:
        eos: Ids that end an answer.
        vocab_size: Ids that the base knows.
        max_tokens: Tokens of a prompt, at most; None for no limit.
    """

    eos: frozenset[int]
    vocab_size: int
    max_tokens: int | None

    def fits(self, length: int) -> bool:
        """Return whether a prompt of `length` tokens leaves room for an answer."""
        return self.max_tokens is None or length <= self.max_tokens


@dataclass
class Task:
    """A row that is being answered.

    Attributes:
        number: Number of the row in the data set.
        row: The row.
        seed: Seed of its answers.
        temperature: Temperature of its answers.
        parts: Ids that stand before each answer.
        ids: All ids so far.
        mask: Which of `ids` the base wrote.
        parts_added: How many of `parts` are in `ids`.
        finish: `eos`, or `length` once an answer was cut short, or left out because there was no room.
        done: Whether all answers are there.
    """

    number: int
    row: Row
    seed: int
    temperature: float
    parts: list[list[int]]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    parts_added: int = 0
    finish: str = "eos"
    done: bool = False

    def add_prompt(self, limits: BaseLimits) -> None:
        """Append the ids before the next answer; without a next answer, or room for one, the task is done."""
        part = self.parts[self.parts_added] if self.parts_added < len(self.parts) else None
        if part is not None and self.ids and self.ids[-1] in limits.eos:
            # The base ended its turn itself, so the template must not end it again, in whatever way.
            part = part[next((index + 1 for index, token in enumerate(part[:2]) if token in limits.eos), 0) :]
        if part is None or not limits.fits(len(self.ids) + len(part)):
            self.finish = self.finish if part is None else "length"
            self.done = True
            return
        self.ids, self.mask = self.ids + part, self.mask + [False] * len(part)
        self.parts_added += 1

    def add_answer(self, answer: Sequence[int], limits: BaseLimits) -> None:
        """Append an answer, and the ids before the next."""
        self.ids, self.mask = self.ids + list(answer), self.mask + [True] * len(answer)
        if answer[-1] not in limits.eos:
            self.finish = "length"
        self.add_prompt(limits)


def make_task(
    number: int,
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    limits: BaseLimits,
    *,
    seed: int,
    temperatures: Sequence[float],
) -> Task:
    """Make the task of a row, with its first prompt.

    The task's seed and temperature, and how much of a text is its prompt, depend on `seed` and `number` alone.

    Args:
        number: Number of the row in the data set.
        row: The row.
        tokenizer: The base's tokenizer.
        limits: Limits of the base.
        seed: Seed of the run.
        temperatures: Temperatures, of which one is drawn.

    Raises:
        CheckpointError: The row holds nothing to answer, or its prompt is too long.
        MismatchError: The row's ids are not this base's.
    """
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=24).digest()
    task_seed, which, share = (int.from_bytes(digest[start : start + 8], "big") for start in (0, 8, 16))
    beginning = MIN_BEGINNING_TOKENS + share % (MAX_BEGINNING_TOKENS - MIN_BEGINNING_TOKENS + 1)
    parts = _parts(row, tokenizer, beginning)
    if not parts or not parts[0]:
        raise CheckpointError("an empty prompt")
    highest = max(max(part, default=0) for part in parts)
    if highest >= limits.vocab_size:
        raise MismatchError(f"token id {highest}, but the base knows {limits.vocab_size} ids")
    task = Task(number, row, task_seed % SEED_RANGE, temperatures[which % len(temperatures)], parts)
    task.add_prompt(limits)
    if task.done:
        raise CheckpointError(f"a prompt of {len(parts[0])} tokens; at most {limits.max_tokens} leave room to write")
    return task


def _parts(row: Row, tokenizer: PreTrainedTokenizerBase, beginning: int) -> list[list[int]]:
    """Return the ids before each answer; of a plain text, at most `beginning` tokens."""
    if row.messages is not None:
        return _turns(row.messages, tokenizer)
    if row.prompt is not None:
        return [encode_prompt(row, tokenizer)]
    if row.text is not None:
        return [_beginning(tokenizer(row.text[:BEGINNING_CHARS])["input_ids"], beginning)]
    assert row.ids is not None
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError("the ids were made with another tokenizer than this base's")
    mask = row.loss_mask or [True] * len(row.ids)
    if True not in mask:
        raise CheckpointError('nothing in "loss_mask" is true, so there is nothing to answer')
    return [row.ids[: mask.index(True)] or _beginning(row.ids, beginning)]


def _beginning(ids: list[int], max_tokens: int) -> list[int]:
    """Return the beginning of a text, at most half of it, so that the base has something left to write."""
    return ids[: min(max_tokens, (len(ids) + 1) // 2)]


def _turns(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids before each assistant turn of a conversation; without such turns, after each user turn."""
    asked = [turn for turn in messages if turn["role"] != "assistant"]
    if not any(turn["role"] == "user" for turn in asked):
        raise CheckpointError("no user turn, so there is nothing to answer")
    marker = MARKER
    while any(marker in turn["content"] for turn in asked):
        marker += "Z"
    answer, chat, parts = {"role": "assistant", "content": marker}, list[dict[str, str]](), list[list[int]]()
    for turn in messages:
        if turn["role"] == "assistant":
            parts.append(_render(chat, marker, tokenizer))
            chat.append(answer)
            continue
        chat.append(turn)
        if len(asked) == len(messages) and turn["role"] == "user":
            parts.append(_render(chat, marker, tokenizer))
            chat.append(answer)
    return parts


def _render(chat: list[dict[str, str]], marker: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the template puts after the last answer of a chat, up to where the next one begins.

    Without an answer yet, those are the ids of the whole chat.
    """
    if not any(turn["role"] == "user" for turn in chat):
        raise CheckpointError("the assistant speaks before any user turn")
    try:
        text: Any = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own
        raise CheckpointError(f"the chat template fails: {first_line(error)}") from error
    if not any(turn["role"] == "assistant" for turn in chat):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if marker not in text:
        raise CheckpointError("the chat template leaves the assistant's last turn out")
    return ids_behind(text[text.rindex(marker) :], len(marker), tokenizer)


def ids_behind(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode `text[start:]` as it stands after other text; by itself, many tokenizers would put a space before it."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        if not any(first < start < end for first, end in spans):
            ids: Collection[int] = encoded["input_ids"]
            return [token for token, (_, end) in zip(ids, spans, strict=True) if end > start]
    return tokenizer(text[start:], add_special_tokens=False)["input_ids"]
