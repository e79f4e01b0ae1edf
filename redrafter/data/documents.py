"""Encode rows as documents, which are token ids with a loss mask, or as prompts.

Conversations are rendered with the tokenizer's chat template, and only the assistant's turns are learnt. Of a text all
tokens are learnt; of a prompt and its answer, the answer; of token ids, those that the row's own mask selects.
"""

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.data.rows import Row, fingerprint
from redrafter.data.windows import Document
from redrafter.errors import CheckpointError, MismatchError, UnsupportedError, first_line

__all__ = ["encode_documents", "encode_prompt", "format_sample", "sample_prompts"]

GROUP_CHARACTERS = 1_000_000  # of rows that are tokenized at once, on all cores
SHOWN_CHARACTERS = 200  # of a sample in an error

Span = tuple[int, int]  # first character, and the one after the last


def encode_documents(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """Yield the documents of rows, in the order of the rows.

    A row becomes one document, or several where the chat template renders earlier turns differently as the
    conversation goes on.

    Args:
        rows: Rows of training data.
        tokenizer: The base's tokenizer.

    Raises:
        CheckpointError: If a row cannot be encoded or teaches nothing. The message names file and line.
        MismatchError: If a row has ids of another tokenizer.
        UnsupportedError: If the tokenizer does not say which characters a token stands for, and a row needs that.
    """
    for group in _groups(rows):
        documents: list[list[Document]] = [[] for _ in group]
        texts, answers = list[tuple[int, str]](), list[tuple[int, str, list[Span]]]()
        for index, row in enumerate(group):
            _check_tokenizer(row, tokenizer)
            if row.text is not None:
                texts.append((index, row.text))
            elif row.ids is not None and row.loss_mask is not None:
                documents[index].append(Document(row.ids, row.loss_mask, row.where))
            elif row.prompt is not None:
                answers.append((index, *_join_answer(row)))
            else:
                answers += [(index, text, spans) for text, spans in _render(row, tokenizer)]
        encoded = _encode([(group[index], text) for index, text in texts], tokenizer)
        for (index, _), (ids, _) in zip(texts, encoded, strict=True):
            documents[index].append(Document(ids, [True] * len(ids), group[index].where))
        encoded = _encode([(group[index], text) for index, text, _ in answers], tokenizer, offsets=True)
        for (index, _, spans), (ids, offsets) in zip(answers, encoded, strict=True):
            documents[index].append(Document(ids, _mask(spans, offsets), group[index].where))
        for row, row_documents in zip(group, documents, strict=True):
            yield from _keep_learnable(row, row_documents, tokenizer)


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in groups of about `GROUP_CHARACTERS` characters, which are tokenized together."""
    group, size = list[Row](), 0
    for row in rows:
        group.append(row)
        contents = [row.text or row.ids or "", row.prompt or "", row.answer or ""]
        size += sum(map(len, [*contents, *(turn["content"] for turn in row.messages or ())]))
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    yield group


def _check_tokenizer(row: Row, tokenizer: PreTrainedTokenizerBase) -> None:
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError(
            f"{row.where}: made with tokenizer {row.tokenizer}, this base's is {fingerprint(tokenizer)}; make the row "
            "anew with this base"
        )


def _keep_learnable(row: Row, documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Return the documents of a row that teach something. Raises `CheckpointError` where none does."""
    learnable = [document for document in documents if document.learnable]
    if learnable:
        return learnable
    if any(any(document.mask) for document in documents):
        raise CheckpointError(f"{row.where}: too short: two tokens in a row, after a first, are needed to learn from")
    sample = _decode(documents[0].ids if documents else [], tokenizer)[:SHOWN_CHARACTERS]
    raise CheckpointError(f"{row.where}: nothing to learn, its loss mask is empty; the sample is {sample!r}")


def _join_answer(row: Row) -> tuple[str, list[Span]]:
    """Return a prompt and its answer as one text, and the span of the answer."""
    assert row.prompt is not None
    if not row.answer:
        raise CheckpointError(f"{row.where}: a prompt without an answer, so there is nothing to learn")
    text = row.prompt + row.answer
    return text, [(len(row.prompt), len(text))]


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Span]]]:
    """Yield rendered texts of a conversation, each with the spans of its assistant turns.

    Stock templates do not mark what the assistant wrote. So a turn is taken to be what the conversation up to and with
    it adds to the prompt that asks for it. Where such a prompt does not continue the text so far (templates that drop
    the thinking of earlier turns), the text so far is yielded and another begins. An assistant turn that opens the
    conversation answers nothing, so it is not learnt.
    """
    assert row.messages is not None
    answer_indices = [index for index, turn in enumerate(row.messages) if index and turn["role"] == "assistant"]
    if not answer_indices:
        raise CheckpointError(f"{row.where}: no assistant turn that answers something, so there is nothing to learn")
    text, spans = "", list[Span]()
    for index in answer_indices:
        prompt = _apply_template(row, row.messages[:index], tokenizer, add_generation_prompt=True)
        answered = _apply_template(row, row.messages[: index + 1], tokenizer)
        if not answered.startswith(prompt):
            raise CheckpointError(
                f"{row.where}: the chat template asks for the assistant's turn with {prompt[-40:]!r}, but does not "
                "write that turn so; use one that does"
            )
        if spans and not prompt.startswith(text):
            yield text, spans
            spans = []
        text, spans = answered, [*spans, (len(prompt), len(answered))]
    yield text, spans


def _apply_template(
    row: Row, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise CheckpointError(
            f"{row.where}: the tokenizer of {name} has no chat template: set tokenizer.chat_template, or use rows of "
            "text"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except Exception as error:  # a template is a program of its own
        raise CheckpointError(f"{row.where}: the chat template fails: {first_line(error)}") from error


def _encode(
    texts: list[tuple[Row, str]], tokenizer: PreTrainedTokenizerBase, offsets: bool = False
) -> list[tuple[list[int], list[Span]]]:
    """Return the token ids of each text and, if `offsets`, the span of each token.

    Special tokens are added, but not to a rendered conversation, or to a text that opens with the BOS token itself.
    """
    if offsets and texts and not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so answers cannot be told "
            "from what they answer; use a base with a fast tokenizer, or rows of plain text"
        )
    has_special = [row.messages is not None or _opens_with_bos(text, tokenizer) for row, text in texts]
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


def _tokenize(texts: list[tuple[Row, str]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Any:
    """Tokenize texts together. Raises `CheckpointError` naming the row where the tokenizer fails."""
    try:
        return tokenizer([text for _, text in texts], **options)
    except Exception:  # tokenize one by one to find the row
        for row, text in texts:
            try:
                tokenizer(text, **options)
            except Exception as error:
                raise CheckpointError(f"{row.where}: the tokenizer fails: {first_line(error)}") from error
        raise


def _opens_with_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text spells the BOS token at its beginning, and so must get no second one."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _mask(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Return of each token whether it ends within a span. Ends decide: a token's offsets may leave out its space."""
    bounds = [bound for span in spans for bound in span]  # rising; a token is inside where an odd number precede it
    return [bisect_left(bounds, end) % 2 == 1 for _, end in offsets]


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
    _check_tokenizer(row, tokenizer)
    if row.messages is not None:
        roles = [turn["role"] for turn in row.messages]
        after_user = roles.index("user") + 1 if "user" in roles else 0
        stop = roles.index("assistant", 1) if "assistant" in roles[1:] else after_user
        if stop == 0:
            return []
        text = _apply_template(row, row.messages[:stop], tokenizer, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if row.prompt is not None:
        return list(_encode([(row, row.prompt)], tokenizer)[0][0])
    if row.text == "":
        return []
    ids = row.ids if row.ids is not None else _encode([(row, row.text or "")], tokenizer)[0][0]
    mask = row.loss_mask or [True]
    first = mask.index(True) if True in mask else len(mask)
    return list(ids[:first] if first > 1 else ids[: int(len(ids) * text_share)][:max_text_tokens])


def format_sample(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a document, with the tokens to learn between ⟦ and ⟧."""
    formatted, end, decoded = "", 0, ""
    for learnt, run in groupby(document.mask):
        end += len(list(run))
        # Decoded from the beginning: a token by itself may lose its space. Half a character goes to the next part.
        text = _decode(document.ids[:end], tokenizer)
        text = text if end == len(document.ids) else text.rstrip("\ufffd")
        part = text[len(decoded) :]
        formatted, decoded = formatted + (f"⟦{part}⟧" if learnt else part), text
    return formatted


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
