"""Encode rows as prompts, and texts and conversations of rows as tokens, with errors that name the row."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from redrafter.chat.control_tokens import choose_marker, control_tokens_of, remove_markers
from redrafter.chat.messages import find_missing_turn, render_chat
from redrafter.chat.template import ChatError, chat_template_of, opens_with_bos
from redrafter.data.rows import Row, fingerprint
from redrafter.errors import CheckpointError, MismatchError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # first character, and the one after the last


def check_tokenizer(row: Row, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise `MismatchError` if a row says that its token ids were made with another tokenizer than the base's."""
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError(
            f"{row.where}: made with tokenizer {row.tokenizer}, this base's is {fingerprint(tokenizer)}; make it again"
        )


class RowChat:
    """A row's conversation, rendered and encoded as the server does; control tokens that it spells are text.

    Rendered texts have a marker in the control tokens that the row spells. All methods raise `CheckpointError`, which
    names the row, if there is no chat template or it fails.
    """

    def __init__(self, row: Row, tokenizer: "PreTrainedTokenizerBase"):
        self._row = row
        with self._named(", or use rows of text"):
            self.template = chat_template_of(tokenizer)
        with self._named():
            self._marker = choose_marker(row.messages, row.tools, row.template_kwargs, self.template.text)

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """Render messages with the row's tools and variables."""
        row, options = self._row, {"add_generation_prompt": add_generation_prompt}
        with self._named():
            return render_chat(self.template, messages, row.tools, row.template_kwargs, marker=self._marker, **options)

    def mark_answer(self, text: str) -> str:
        """Return a part of an answer with markers, as in rendered texts."""
        message = {"role": "assistant", "content": text}
        return str(control_tokens_of(self.template).mark_message(message, self._marker)["content"])

    def is_marked(self, text: str) -> bool:
        """Return whether a rendered text has markers."""
        return remove_markers(text, self._marker) != text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, or of a part of one."""
        with self._named():
            return control_tokens_of(self.template).encode(text, self._marker)

    def encode_after(self, text: str, start: int) -> list[int]:
        """Encode `text[start:]` in the context of the preceding text, since many tokenizers add a leading space."""
        return ids_after(self.encode(text[:start]), self.encode(text), lambda: self.encode(text[start:]))

    def warn_of_missing_turn(self, messages: list[dict[str, Any]], text: str) -> None:
        """Warn if a rendered chat lacks the text or the calls of a turn; only the first such row is named."""
        template, text = self.template, remove_markers(text, self._marker)
        if not template.warned and (missing := find_missing_turn(template, messages, text)) is not None:
            template.warned = True
            warnings.warn(f"{self._row.where}: the chat template leaves out {missing}", stacklevel=2)

    @contextmanager
    def _named(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except ChatError as error:
            raise CheckpointError(f"{self._row.where}: {error}{advice}") from error


def ids_after(before: list[int], whole: list[int], alone: Callable[[], list[int]]) -> list[int]:
    """Return the ids that continue `before` in `whole`; those encoded `alone` where a token would span the boundary."""
    return whole[len(before) :] if whole[: len(before)] == before else alone()


def encode_texts(texts: list[tuple[Row, str]], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Return the token ids of each text.

    Special tokens are added, but not to a rendered conversation, or to a text that opens with the BOS token itself.
    Each text comes with the row that it was made from, which errors name.
    """
    return [ids for ids, _ in encode_with_offsets(texts, tokenizer, offsets=False)]


def encode_with_offsets(
    texts: list[tuple[Row, str]], tokenizer: "PreTrainedTokenizerBase", *, offsets: bool = True
) -> list[tuple[list[int], list[Span]]]:
    """Return the token ids of each text, as `encode_texts` does, and if `offsets`, the span of each token."""
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
    count: int | None,
    max_tokens: int,
    seed: int,
    *,
    least: int = 1,
    **cut: Any,
) -> list[list[int]]:
    """Return up to `count` prompts of randomly chosen rows, or all; `cut` is for `encode_prompt`.

    Rows whose prompts have fewer than `least` or more than `max_tokens` tokens are passed over.
    """
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    # One by one until there are enough, since long texts take time to encode.
    encoded = (encode_prompt(row, tokenizer, **cut) for row in shuffled)
    return list(islice((ids for ids in encoded if least <= len(ids) <= max_tokens), count))


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
    learnt. The prompt of a text, or of ids where fewer than two come before the first one to be learnt, is
    their beginning: `text_share` of their tokens, rounded down, and at most `max_text_tokens`; None for no limit.
    """
    check_tokenizer(row, tokenizer)
    if row.messages is not None:
        turns = turns_before_answer(row)
        if not turns:
            return []
        chat = RowChat(row, tokenizer)
        text = chat.render(turns, add_generation_prompt=True)
        chat.warn_of_missing_turn(turns, text)
        return chat.encode(text)
    if row.prompt is not None:
        return encode_texts([(row, row.prompt)], tokenizer)[0]
    if row.text == "":
        return []
    ids = row.ids if row.ids is not None else encode_texts([(row, row.text or "")], tokenizer)[0]
    mask = row.loss_mask or [True]
    first = mask.index(True) if True in mask else len(mask)
    return list(ids[:first] if first > 1 else ids[: int(len(ids) * text_share)][:max_text_tokens])
