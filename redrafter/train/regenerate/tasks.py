"""A row of a data set as a task for the base: what stands before each of its answers, and what came of them.

A template is rendered with a marker in place of every answer, so that what it puts behind an answer is found whatever
it would do to the answer's own text. The base's ids are kept as it wrote them, and the template's go around them: the
next answer is asked for behind exactly what the base saw and wrote before.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.data.documents import encode_prompt
from redrafter.data.rows import Row, fingerprint
from redrafter.errors import CheckpointError, MismatchError, first_line

__all__ = ["Limits", "Task", "task_of"]

SHORTEST, LONGEST = 16, 64  # tokens of a plain text that the base is given
BEGINNING = 8192  # characters of a plain text that are read for them
MARKER = "AnswerOfTheBase"
MOST_SEEDS = 1 << 62


@dataclass(frozen=True)
class Limits:
    """What a base allows. eos: ids that end an answer. longest: tokens of a prompt; None: as many as you like."""

    eos: frozenset[int]
    vocab_size: int
    longest: int | None

    def fits(self, length: int) -> bool:
        return self.longest is None or length <= self.longest


@dataclass
class Task:
    """A row on its way. number: of the row in its data set. parts: the ids that stand before each answer.

    ids, mask: all so far, and which of it the base wrote. finish: `length` once an answer was cut, or left out for want
    of room.
    """

    number: int
    row: Row
    seed: int
    temperature: float
    parts: list[list[int]]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    asked: int = 0
    finish: str = "eos"
    done: bool = False

    def ask(self, limits: Limits) -> None:
        """Put what stands before the next answer behind what there is; without a next answer, or room, it is done."""
        part = self.parts[self.asked] if self.asked < len(self.parts) else None
        if part is not None and self.ids and self.ids[-1] in limits.eos:
            # The base ended its turn itself: the template is not to end it once more, be it in another way.
            part = part[next((place + 1 for place, token in enumerate(part[:2]) if token in limits.eos), 0) :]
        if part is None or not limits.fits(len(self.ids) + len(part)):
            self.finish = self.finish if part is None else "length"
            self.done = True
            return
        self.ids, self.mask = self.ids + part, self.mask + [False] * len(part)
        self.asked += 1

    def take(self, written: Sequence[int], limits: Limits) -> None:
        """Write down an answer, and ask for the next."""
        self.ids, self.mask = self.ids + list(written), self.mask + [True] * len(written)
        if written[-1] not in limits.eos:
            self.finish = "length"
        self.ask(limits)


def task_of(
    number: int,
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    *,
    seed: int,
    temperatures: Sequence[float],
) -> Task:
    """A row with its first prompt. Its seed, its temperature and how much of a text it begins with depend on `seed` and
    `number` alone. Raises `CheckpointError` or `MismatchError` for a row that the base cannot be asked."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=24).digest()
    own, which, share = (int.from_bytes(digest[start : start + 8], "big") for start in (0, 8, 16))
    most = SHORTEST + share % (LONGEST - SHORTEST + 1)
    parts = _parts(row, tokenizer, most)
    if not parts or not parts[0]:
        raise CheckpointError("an empty prompt")
    highest = max(max(part, default=0) for part in parts)
    if highest >= limits.vocab_size:
        raise MismatchError(f"token id {highest}, but the base knows {limits.vocab_size} ids")
    task = Task(number, row, own % MOST_SEEDS, temperatures[which % len(temperatures)], parts)
    task.ask(limits)
    if task.done:
        raise CheckpointError(f"a prompt of {len(parts[0])} tokens; at most {limits.longest} leave room to write")
    return task


def _parts(row: Row, tokenizer: PreTrainedTokenizerBase, most: int) -> list[list[int]]:
    """What stands before each answer."""
    if row.messages is not None:
        return _turns(row.messages, tokenizer)
    if row.prompt is not None:
        return [encode_prompt(row, tokenizer)]
    if row.text is not None:
        return [_beginning(tokenizer(row.text[:BEGINNING])["input_ids"], most)]
    assert row.ids is not None
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError("the ids were made with another tokenizer than this base's")
    mask = row.loss_mask or [True] * len(row.ids)
    if True not in mask:
        raise CheckpointError('nothing in "loss_mask" is true, so there is nothing to answer')
    return [row.ids[: mask.index(True)] or _beginning(row.ids, most)]


def _beginning(ids: list[int], most: int) -> list[int]:
    """At most half of a text, which says what it is about, and not what the base makes of it."""
    return ids[: min(most, (len(ids) + 1) // 2)]


def _turns(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Where the assistant speaks in the row, the base does; where it never does, after each of the user's turns."""
    asked = [turn for turn in messages if turn["role"] != "assistant"]
    if not any(turn["role"] == "user" for turn in asked):
        raise CheckpointError("no user turn, so there is nothing to answer")
    marker = MARKER
    while any(marker in turn["content"] for turn in asked):
        marker += "Z"
    answer, talk, parts = {"role": "assistant", "content": marker}, list[dict[str, str]](), list[list[int]]()
    for turn in messages:
        if turn["role"] == "assistant":
            parts.append(_render(talk, marker, tokenizer))
            talk.append(answer)
            continue
        talk.append(turn)
        if len(asked) == len(messages) and turn["role"] == "user":
            parts.append(_render(talk, marker, tokenizer))
            talk.append(answer)
    return parts


def _render(talk: list[dict[str, str]], marker: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the template puts behind the last answer of a talk, up to where the next begins; all of it when there is no
    answer yet."""
    if not any(turn["role"] == "user" for turn in talk):
        raise CheckpointError("the assistant speaks before any user turn")
    try:
        text: Any = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own
        raise CheckpointError(f"the chat template fails: {first_line(error)}") from error
    if not any(turn["role"] == "assistant" for turn in talk):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    if marker not in text:
        raise CheckpointError("the chat template leaves the assistant's last turn out")
    return _behind(text[text.rindex(marker) :], len(marker), tokenizer)


def _behind(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of `text[start:]` as they stand behind other text: many tokenizers begin a text of its own with a space."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        if not any(first < start < end for first, end in spans):
            ids: Collection[int] = encoded["input_ids"]
            return [token for token, (_, end) in zip(ids, spans, strict=True) if end > start]
    return tokenizer(text[start:], add_special_tokens=False)["input_ids"]
