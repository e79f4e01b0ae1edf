"""Encode rows as prompts, and texts and conversations of rows as tokens, with errors that name the row."""

import random
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from redrafter.chat.messages import find_missing_turn, render_chat
from redrafter.chat.template import ChatError, ChatTemplate, chat_template_of, opens_with_bos
from redrafter.data.rows import Row, fingerprint
from redrafter.errors import CheckpointError, MismatchError, UnsupportedError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # first character, and the one after the last


def check_tokenizer(row: Row, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise `MismatchError` if a row says that its token ids were made with another tokenizer than the base's."""
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError(
            f"{row.where}: made with tokenizer {row.tokenizer}, this base's is {fingerprint(tokenizer)}; make the row "
            "again with this base"
        )


def template_of(row: Row, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Return the tokenizer's chat template; raise `CheckpointError`, naming the row, if there is none."""
    try:
        return chat_template_of(tokenizer)
    except ChatError as error:
        raise CheckpointError(f"{row.where}: {error}, or use rows of text") from error


def apply_template(
    row: Row, messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", add_generation_prompt: bool = False
) -> str:
    """Render messages with the tokenizer's chat template, as the server does, with a row's tools and variables.

    Raises `CheckpointError` if there is no template, or it fails.
    """
    template = template_of(row, tokenizer)
    try:
        return render_chat(
            template, messages, row.tools, row.template_kwargs, add_generation_prompt=add_generation_prompt
        )
    except ChatError as error:
        raise CheckpointError(f"{row.where}: {error}") from error


def warn_of_missing_turn(
    row: Row, messages: list[dict[str, Any]], text: str, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Warn if a rendered chat lacks the text or the calls of a turn; only the first such row of a template is named."""
    template = template_of(row, tokenizer)
    if not template.warned and (missing := find_missing_turn(template, messages, text)) is not None:
        template.warned = True
        warnings.warn(f"{row.where}: the chat template leaves out {missing}", stacklevel=2)


def encode_texts(
    texts: list[tuple[Row, str]], tokenizer: "PreTrainedTokenizerBase", offsets: bool = False
) -> list[tuple[list[int], list[Span]]]:
    """Return the token ids of each text and, if `offsets`, the span of each token.

    Special tokens are added, but not to a rendered conversation, or to a text that opens with the BOS token itself.
    Each text comes with the row that it was made from, which errors name.
    """
    if offsets and texts and not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not say which characters a token spells, so answers cannot be separated "
            "from what they answer; use a base with a fast tokenizer, or rows of plain text"
        )
    # Templates write special tokens themselves.
    has_special = [row.messages is not None or opens_with_bos(text, tokenizer) for row, text in texts]
    encoded: list[tuple[list[int], list[Span]]] = [([], [])] * len(texts)
    for add_special in (False, True):
        indices = [index for index, has in enumerate(has_special) if has != add_special]
        if not indices:
            continue
        options = {"add_special_tokens": add_special, "return_offsets_mapping": offsets, "verbose": False}
        tokens = _tokenize([texts[index] for index in indices], tokenizer, options)
        for number, index in enumerate(indices):
            encoded[index] = tokens["input_ids"][number], tokens["offset_mapping"][number] if offsets else []
    return encoded


def _tokenize(texts: list[tuple[Row, str]], tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any]) -> Any:
    try:
        return tokenizer([text for _, text in texts], **options)
    except Exception:  # tokenize one by one to find the row
        for row, text in texts:
            try:
                tokenizer(text, **options)
            except Exception as error:
                raise CheckpointError(f"{row.where}: the tokenizer fails: {first_line(error)}") from error
        raise


def sample_prompts(
    rows: Iterable[Row],
    tokenizer: "PreTrainedTokenizerBase",
    count: int,
    max_tokens: int,
    seed: int,
    *,
    text_share: float = 1.0,
    max_text_tokens: int | None = None,
) -> list[list[int]]:
    """Return up to `count` prompts of randomly chosen rows.

    Rows whose prompts are empty, or have more than `max_tokens` tokens, are passed over.
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


def turns_before_answer(row: Row) -> list[dict[str, Any]]:
    """Return the turns of a conversation before the first answer that is learnt.

    Without one, return those up to the first turn of a user, or result of a tool, that the row does not answer. There
    are none where nothing asks for an answer, and for a row that is no conversation.
    """
    messages = row.messages or []
    answers = (n for n, turn in enumerate(messages) if n and turn["role"] == "assistant" and turn.get("weight") != 0)
    return messages[: next(answers, next((n + 1 for n in range(len(messages)) if asks(messages, n)), 0))]


def asks(messages: list[dict[str, Any]], number: int) -> bool:
    """Return whether turn `number` of a conversation is a user's turn or a tool's result that no next turn answers."""
    following = messages[number + 1]["role"] if number + 1 < len(messages) else None
    return messages[number]["role"] in ("user", "tool") and following not in ("assistant", "tool")


def encode_prompt(
    row: Row, tokenizer: "PreTrainedTokenizerBase", *, text_share: float = 1.0, max_text_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a row's prompt; none where the row has no prompt.

    The prompt of a conversation is `turns_before_answer`. The prompt of token ids is all before the first one to be
    learnt. The prompt of a text, or of ids where
    fewer than two come before the first one to be learnt, is their beginning: `text_share` of their tokens, rounded
    down, and at most `max_text_tokens`; None for no limit.
    """
    check_tokenizer(row, tokenizer)
    if row.messages is not None:
        turns = turns_before_answer(row)
        if not turns:
            return []
        text = apply_template(row, turns, tokenizer, add_generation_prompt=True)
        warn_of_missing_turn(row, turns, text, tokenizer)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if row.prompt is not None:
        return list(encode_texts([(row, row.prompt)], tokenizer)[0][0])
    if row.text == "":
        return []
    ids = row.ids if row.ids is not None else encode_texts([(row, row.text or "")], tokenizer)[0][0]
    mask = row.loss_mask or [True]
    first = mask.index(True) if True in mask else len(mask)
    return list(ids[:first] if first > 1 else ids[: int(len(ids) * text_share)][:max_text_tokens])
