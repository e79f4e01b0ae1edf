"""From rows to documents: token ids with a loss mask, and to prompts.

Conversations are rendered with the tokenizer's chat template and only the assistant's turns are learnt; of a text,
everything is; of a prompt and its answer, the answer; rows of token ids say it themselves.
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

__all__ = ["documents", "prompt", "prompts", "show_sample"]

GROUP = 1_000_000  # characters of rows that are tokenized at once, on all cores
SHOWN = 200  # characters of a sample in a message

Span = tuple[int, int]


def documents(rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """Rows in tokens: of each one document, or several where the chat template writes earlier turns anew as it goes on.

    Raises `CheckpointError`, or `MismatchError` for ids of another tokenizer, naming file and line.
    """
    for group in _groups(rows):
        found: list[list[Document]] = [[] for _ in group]
        texts, marked = list[tuple[int, str]](), list[tuple[int, str, list[Span]]]()
        for index, row in enumerate(group):
            _check_tokenizer(row, tokenizer)
            if row.text is not None:
                texts.append((index, row.text))
            elif row.ids is not None and row.loss_mask is not None:
                found[index].append(Document(row.ids, row.loss_mask, row.where))
            elif row.prompt is not None:
                marked.append((index, *_answered(row)))
            else:
                marked += [(index, text, spans) for text, spans in _render(row, tokenizer)]
        encoded = _encode([(group[index], text) for index, text in texts], tokenizer)
        for (index, _), (ids, _) in zip(texts, encoded, strict=True):
            found[index].append(Document(ids, [True] * len(ids), group[index].where))
        encoded = _encode([(group[index], text) for index, text, _ in marked], tokenizer, offsets=True)
        for (index, _, spans), (ids, offsets) in zip(marked, encoded, strict=True):
            found[index].append(Document(ids, _mask(spans, offsets), group[index].where))
        for row, made in zip(group, found, strict=True):
            yield from _learnable(row, made, tokenizer)


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows, as many at a time as are worth tokenizing together."""
    group, size = list[Row](), 0
    for row in rows:
        group.append(row)
        written = [row.text or row.ids or "", row.prompt or "", row.answer or ""]
        size += sum(map(len, [*written, *(turn["content"] for turn in row.messages or ())]))
        if size >= GROUP:
            yield group
            group, size = [], 0
    yield group


def _check_tokenizer(row: Row, tokenizer: PreTrainedTokenizerBase) -> None:
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError(
            f"{row.where}: made with tokenizer {row.tokenizer}, this base's is {fingerprint(tokenizer)}; make the row "
            "anew with this base"
        )


def _learnable(row: Row, made: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """The documents of a row that teach something, of which there must be one."""
    found = [document for document in made if document.learnable]
    if found:
        return found
    if any(any(document.mask) for document in made):
        raise CheckpointError(f"{row.where}: too short: two tokens in a row, after a first, are needed to learn from")
    shown = _decode(made[0].ids if made else [], tokenizer)[:SHOWN]
    raise CheckpointError(f"{row.where}: nothing to learn, its loss mask is empty; the sample is {shown!r}")


def _answered(row: Row) -> tuple[str, list[Span]]:
    """A prompt and its answer as one text, and where in it the answer is, as indices of characters."""
    assert row.prompt is not None
    if not row.answer:
        raise CheckpointError(f"{row.where}: a prompt without an answer, so there is nothing to learn")
    text = row.prompt + row.answer
    return text, [(len(row.prompt), len(text))]


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Span]]]:
    """Rendered texts, each with the spans of its assistant turns, as indices of characters.

    Stock templates do not mark what the assistant wrote. But a turn is what the conversation up to it adds to the
    prompt that asks for it. Where such a prompt does not go on from the text so far (templates that drop earlier turns'
    thinking), the text so far is finished and another begins. A turn that opens the conversation answers nothing, so
    it is read and not learnt.
    """
    assert row.messages is not None
    asked = [index for index, turn in enumerate(row.messages) if index and turn["role"] == "assistant"]
    if not asked:
        raise CheckpointError(f"{row.where}: no assistant turn that answers something, so there is nothing to learn")
    text, spans = "", list[Span]()
    for index in asked:
        begun = _template(row, row.messages[:index], tokenizer, add_generation_prompt=True)
        whole = _template(row, row.messages[: index + 1], tokenizer)
        if not whole.startswith(begun):
            raise CheckpointError(
                f"{row.where}: the chat template asks for the assistant's turn with {begun[-40:]!r}, but does not "
                "write that turn so; use one that does"
            )
        if spans and not begun.startswith(text):
            yield text, spans
            spans = []
        text, spans = whole, [*spans, (len(begun), len(whole))]
    yield text, spans


def _template(
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
    """Token ids of some texts, and, where `offsets` are wanted, the characters of each token.

    A rendered conversation brings its special tokens; so does a text that opens with the token that begins one.
    """
    if offsets and texts and not tokenizer.is_fast:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, so answers cannot be told "
            "from what they answer; use a base with a fast tokenizer, or rows of plain text"
        )
    bare = [row.messages is not None or _opens(text, tokenizer) for row, text in texts]
    found: list[tuple[list[int], list[Span]]] = [([], [])] * len(texts)
    for special in (False, True):
        places = [place for place, has in enumerate(bare) if has != special]
        how: dict[str, Any] = {"add_special_tokens": special, "return_offsets_mapping": offsets, "verbose": False}
        encoded = _tokenized([texts[place] for place in places], tokenizer, how) if places else {"input_ids": []}
        for number, place in enumerate(places):
            found[place] = encoded["input_ids"][number], encoded["offset_mapping"][number] if offsets else []
    return found


def _tokenized(texts: list[tuple[Row, str]], tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    try:
        return tokenizer([text for _, text in texts], **how)
    except Exception:  # which of them was it?
        for row, text in texts:
            try:
                tokenizer(text, **how)
            except Exception as error:
                raise CheckpointError(f"{row.where}: the tokenizer fails: {first_line(error)}") from error
        raise


def _opens(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text brings the token that begins a text itself, and so must get no second one."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _mask(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Which tokens lie in a span, by their ends: a tokenizer may leave leading spaces out of what a token covers."""
    bounds = [bound for span in spans for bound in span]  # rising; a token is inside where an odd number precede it
    return [bisect_left(bounds, end) % 2 == 1 for _, end in offsets]


def prompts(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    longest: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> list[list[int]]:
    """At most `count` prompts of at most `longest` tokens, as `prompt` makes them. Which rows: shuffled by seed."""
    chosen = list(rows)
    random.Random(seed).shuffle(chosen)
    found: list[list[int]] = []
    for row in chosen:
        if len(found) == count:
            break
        begun = prompt(row, tokenizer, share=share, most=most)
        if 0 < len(begun) <= longest:
            found.append(begun)
    return found


def prompt(row: Row, tokenizer: PreTrainedTokenizerBase, *, share: float = 1.0, most: int | None = None) -> list[int]:
    """The token ids that a base is to write on from; none where a row has no such.

    Of a conversation all before the assistant's first answer, or its first user turn when nobody answers; of tokens all
    before the first to be learnt; of a text, or where no token comes before more than one, the beginning: this `share`
    of its tokens, rounded down, and at most `most`.
    """
    _check_tokenizer(row, tokenizer)
    if row.messages is not None:
        roles = [turn["role"] for turn in row.messages]
        after = roles.index("user") + 1 if "user" in roles else 0
        stop = roles.index("assistant", 1) if "assistant" in roles[1:] else after
        if stop == 0:
            return []
        text = _template(row, row.messages[:stop], tokenizer, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if row.prompt is not None:
        return list(_encode([(row, row.prompt)], tokenizer)[0][0])
    if row.text == "":
        return []
    ids = row.ids if row.ids is not None else _encode([(row, row.text or "")], tokenizer)[0][0]
    mask = row.loss_mask or [True]
    first = mask.index(True) if True in mask else len(mask)
    return list(ids[:first] if first > 1 else ids[: int(len(ids) * share)][:most])


def show_sample(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    """A document as text, what is learnt of it between ⟦ and ⟧."""
    shown, place, done = "", 0, ""
    for learnt, run in groupby(document.mask):
        place += len(list(run))
        # Decoded from the beginning: a token by itself may lose its space. Half a character goes to the next part.
        text = _decode(document.ids[:place], tokenizer)
        text = text if place == len(document.ids) else text.rstrip("\ufffd")
        part = text[len(done) :]
        shown, done = shown + (f"⟦{part}⟧" if learnt else part), text
    return shown


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
