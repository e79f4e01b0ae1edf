"""Split a row into the ids before each answer that the base is to write.

The chat template is rendered with a marker in place of every answer, to find the text that follows an answer even if
the template transforms answers. Turns of weight 0 are the context of others: they stay as they are.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.data.prompts import RowChat, asks, check_tokenizer, encode_prompt
from redrafter.data.rows import Row
from redrafter.errors import CheckpointError

BEGINNING_CHARS = 8192  # characters of a plain text that are tokenized for its prompt
MARKER = "AnswerOfTheBase"
INVENTED = [{"role": "user", "content": ""}]  # marks a conversation whose user turn the base generates
NO_ANSWER = [-1]  # ids that no answer ends with


@dataclass(frozen=True)
class AnswerPrompt:
    """Ids before an answer."""

    ids: list[int]
    # Ids with which the answer before it has to end: the call whose result the part contains. Empty without a result.
    call: list[int] = field(default_factory=list)

    def follows(self, answer: list[int]) -> bool:
        """Return whether the part may follow an answer, which is given without its end token."""
        return not self.call or answer[-len(self.call) :] == self.call


def split_row(row: Row, tokenizer: PreTrainedTokenizerBase, begin: int, ends: Collection[int]) -> list[AnswerPrompt]:
    """Return the ids before each answer; for a plain text, at most `begin` tokens. `ends` are the end tokens.

    Raises:
        CheckpointError: The row has nothing to answer.
        MismatchError: The row's ids are not of this tokenizer.
    """
    if row.messages is INVENTED:
        return _split_invented(RowChat(row, tokenizer))
    if row.messages is not None:
        return _split_conversation(RowChat(row, tokenizer), row.messages, ends)
    if row.prompt is not None:
        return [AnswerPrompt(encode_prompt(row, tokenizer))]
    if row.text is not None:
        return [AnswerPrompt(_beginning(tokenizer(row.text[:BEGINNING_CHARS])["input_ids"], begin))]
    assert row.ids is not None
    check_tokenizer(row, tokenizer)
    mask = row.loss_mask or [True] * len(row.ids)
    if True not in mask:
        raise CheckpointError('nothing in "loss_mask" is true, so there is nothing to answer')
    return [AnswerPrompt(row.ids[: mask.index(True)] or _beginning(row.ids, begin))]


def _beginning(ids: list[int], max_tokens: int) -> list[int]:
    """Return the beginning of a text, at most half of it, so that a continuation remains to be generated."""
    return ids[: min(max_tokens, (len(ids) + 1) // 2)]


def _split_conversation(chat: RowChat, messages: list[dict[str, Any]], ends: Collection[int]) -> list[AnswerPrompt]:
    """Return the ids before each assistant turn of a conversation; without such turns, after what asks for one."""
    if not any(turn["role"] == "user" for turn in messages):
        raise CheckpointError("no user turn, so there is nothing to answer")
    answers = [turn["role"] == "assistant" and turn.get("weight") != 0 for turn in messages]
    marker = MARKER
    # The marker must not occur in the conversation itself.
    while any(marker in turn["content"] for turn, answered in zip(messages, answers, strict=True) if not answered):
        marker += "Z"
    answer, turns, parts = {"role": "assistant", "content": marker}, list[dict[str, Any]](), list[AnswerPrompt]()
    call = list[int]()  # with which the last answer has to end before the next turns of the chat
    for number, (turn, answered) in enumerate(zip(messages, answers, strict=True)):
        if not answered:
            turns.append(turn)
            if any(answers) or not asks(messages, number):
                continue
        try:
            parts.append(AnswerPrompt(_encode_next(chat, turns, marker), call))
        except CheckpointError:
            # Templates may refuse a result after an answer without a call.
            if not call:
                raise
            return [*parts, AnswerPrompt([], NO_ANSWER)]
        has_result = answered and any(following["role"] == "tool" for following in messages[number + 1 : number + 2])
        call = _call(chat, turns, turn, ends) if has_result else []
        turns.append(answer)
    return parts


def _call(chat: RowChat, turns: list[dict[str, Any]], turn: dict[str, Any], ends: Collection[int]) -> list[int]:
    """Return the ids that the template writes of a turn after others, without its thoughts and its end token."""
    try:
        prompt, text = chat.render(turns, add_generation_prompt=True), chat.render([*turns, turn])
    except CheckpointError:
        return NO_ANSWER
    marks, written = chat.template.thoughts(), text[len(prompt) :]
    if not text.startswith(prompt):
        return NO_ANSWER
    if marks is not None:
        written = written.rpartition(marks.end)[2]
    written = written.lstrip()
    ids = chat.encode_after(text, len(text) - len(written))
    return ids[: next((index for index, token in enumerate(ids) if token in ends), len(ids))] or NO_ANSWER


def _split_invented(chat: RowChat) -> list[AnswerPrompt]:
    """Return the ids before the content of a first user turn, and those between it and the assistant's answer."""
    text = chat.render([{"role": "user", "content": MARKER}], add_generation_prompt=True)
    before, found, _ = text.partition(MARKER)
    if not found or not before:
        raise CheckpointError("the chat template puts nothing before a user's question, so the base cannot invent one")
    return [AnswerPrompt(chat.encode(before)), AnswerPrompt(chat.encode_after(text[len(before) :], len(MARKER)))]


def _encode_next(chat: RowChat, turns: list[dict[str, Any]], marker: str) -> list[int]:
    """Return the ids that the template puts between the last answer of some turns and the next one.

    For turns without answers, returns the ids of all.
    """
    if not any(turn["role"] == "user" for turn in turns):
        raise CheckpointError("the assistant speaks before any user turn")
    text = chat.render(turns, add_generation_prompt=True)
    if not any(turn["content"] == marker for turn in turns):
        return chat.encode(text)
    if marker not in text:
        raise CheckpointError("the chat template leaves the assistant's last turn out")
    # Only the text after the last answer is new: earlier turns are already in the tokens, as the base wrote them.
    return chat.encode_after(text[text.rindex(marker) :], len(marker))
