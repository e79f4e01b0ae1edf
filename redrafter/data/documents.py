"""Encode rows as documents, which are token ids with a loss mask.

Conversations are rendered with the tokenizer's chat template, and only the assistant's turns are learnt. Of a text all
tokens are learnt; of a prompt and its answer, the answer; of token ids, those that the row's own mask selects.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from redrafter.chat.messages import split_thought
from redrafter.data.prompts import (
    Span,
    apply_template,
    check_tokenizer,
    encode_texts,
    template_of,
    warn_of_missing_turn,
)
from redrafter.data.rows import Row
from redrafter.data.windows import Document
from redrafter.errors import CheckpointError

GROUP_CHARACTERS = 1_000_000  # of rows that are tokenized at once, on all cores
SHOWN_CHARACTERS = 200  # of a sample in an error


def encode_documents(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> Iterator[Document]:
    """Yield the documents of rows, in the order of the rows.

    A row becomes one document, or several where the chat template renders earlier turns differently as the
    conversation continues. `ends` are the ids that end an answer of the base: where the template ends an answer with
    the mark of the next turn alone, as GLM's does, that mark is learnt if it is one of them.

    Raises:
        CheckpointError: If a row cannot be encoded or teaches nothing. The message names file and line.
        MismatchError: If a row has ids of another tokenizer.
        UnsupportedError: If the tokenizer does not say which characters a token spells, and a row needs that.
    """
    for group in _groups(rows):
        documents: list[list[Document]] = [[] for _ in group]
        texts, answers = list[tuple[int, str]](), list[tuple[int, str, list[Span]]]()
        for index, row in enumerate(group):
            check_tokenizer(row, tokenizer)
            if row.text is not None:
                texts.append((index, row.text))
            elif row.ids is not None and row.loss_mask is not None:
                documents[index].append(Document(row.ids, row.loss_mask, row.where))
            elif row.prompt is not None:
                if not row.answer:
                    raise CheckpointError(f"{row.where}: a prompt without an answer, so there is nothing to learn")
                text = row.prompt + row.answer
                answers.append((index, text, [(len(row.prompt), len(text))]))
            else:
                answers += [(index, text, spans) for text, spans in _render(row, tokenizer)]
        encoded = encode_texts([(group[index], text) for index, text in texts], tokenizer)
        for (index, _), (ids, _) in zip(texts, encoded, strict=True):
            documents[index].append(Document(ids, [True] * len(ids), group[index].where))
        encoded = encode_texts([(group[index], text) for index, text, _ in answers], tokenizer, offsets=True)
        for (index, _, spans), (ids, offsets) in zip(answers, encoded, strict=True):
            mask = _mask(spans, offsets)
            if group[index].messages is not None:
                mask = _with_ends(ids, mask, ends)
            documents[index].append(Document(ids, mask, group[index].where))
        for row, row_documents in zip(group, documents, strict=True):
            yield from _keep_learnable(row, row_documents, tokenizer)


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group, size = list[Row](), 0
    for row in rows:
        group.append(row)
        contents = [row.text or row.ids or "", row.prompt or "", row.answer or ""]
        size += sum(map(len, [*contents, *(str(turn["content"]) for turn in row.messages or ())]))
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    yield group


def _keep_learnable(row: Row, documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    learnable = [document for document in documents if document.learnable]
    if learnable:
        return learnable
    if any(any(document.mask) for document in documents):
        raise CheckpointError(f"{row.where}: too short: two tokens in a row, after a first, are needed to learn from")
    sample = _decode(documents[0].ids if documents else [], tokenizer)[:SHOWN_CHARACTERS]
    raise CheckpointError(f"{row.where}: nothing to learn, its loss mask is empty; the sample is {sample!r}")


def _render(row: Row, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[Span]]]:
    """Yield rendered texts of a conversation, each with the spans of its assistant turns.

    Where the prompt of a turn does not continue the text so far (templates that drop the thinking of earlier turns),
    the text so far is yielded and another begins. An assistant turn that opens the conversation answers nothing, so it
    is not learnt, and neither are turns of weight 0.
    """
    assert row.messages is not None
    turns = [index for index, turn in enumerate(row.messages) if index and turn["role"] == "assistant"]
    learnt = [index for index in turns if row.messages[index].get("weight") != 0]
    if not learnt:
        what = "no assistant turn of a weight above 0" if turns else "no assistant turn that answers something"
        raise CheckpointError(f"{row.where}: {what}, so there is nothing to learn")
    text, spans, end = "", list[Span](), 0
    for index in learnt:
        prompt = apply_template(row, row.messages[:index], tokenizer, add_generation_prompt=True)
        # Some templates render earlier turns differently, such as without thoughts: then each answer is a document.
        if spans and not prompt.startswith(text):
            warn_of_missing_turn(row, row.messages[:end], text, tokenizer)
            yield text, spans
            spans = []
        text, start = _answer(row, index, prompt, tokenizer)
        spans, end = [*spans, (start, len(text))], index + 1
    warn_of_missing_turn(row, row.messages[:end], text, tokenizer)
    yield text, spans


def _answer(row: Row, index: int, prompt: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return a rendered conversation up to and with an assistant's turn, and where the answer to `prompt` begins in it.

    Stock templates do not mark what the assistant wrote. So the answer is what the conversation adds to the prompt that
    asks for it, or to that prompt with thoughts turned off: an empty thought is then no answer. Templates that open a
    thought in the prompt, and drop it from the turn, get the turn's own thought back.
    """
    assert row.messages is not None
    template, before, turn = template_of(row, tokenizer), row.messages[:index], row.messages[index]
    marks = template.thoughts()
    thought, answer = split_thought(turn, marks)
    opened, closed = "", False  # the prompt without a thought that it opens, and whether it closes that too
    if marks is not None and prompt.rstrip().endswith((marks.begin.strip(), marks.end)):
        opened, _, rest = prompt.rpartition(marks.begin.strip())
        closed = marks.end in rest
    if closed and thought:  # thoughts are off
        turn = {key: value for key, value in turn.items() if "reasoning" not in key} | {"content": answer}
    answered = apply_template(row, [*before, turn], tokenizer)
    asked, *others = template.generation_prompts(row.template_kwargs or {})
    prompts = [prompt]
    if prompt.endswith(asked):
        prompts += [prompt.removesuffix(asked) + other for other in others]
    if found := [len(begin) for begin in prompts if answered.startswith(begin)]:
        return answered, max(found)
    if marks is not None and opened and not closed and answered.startswith(opened):
        if not thought:
            return answered, len(opened)
        written = answered[len(opened) :]
        space = "" if written[:1].isspace() else "\n\n"
        return f"{prompt}{thought}\n{marks.end}{space}{written}", len(prompt)
    raise CheckpointError(
        f"{row.where}: the chat template asks for the assistant's turn with {prompt[-40:]!r}, but does not write that "
        "turn so; let the base answer such rows by `redrafter regenerate`, and train on what that writes"
    )


def _mask(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Return of each token whether it ends within a span. Ends decide: a token's offsets may leave out its space."""
    bounds = [bound for span in spans for bound in span]  # rising; a token is inside where an odd number precede it
    return [bisect_left(bounds, end) % 2 == 1 for _, end in offsets]


def _with_ends(ids: list[int], mask: list[bool], ends: Collection[int]) -> list[bool]:
    """Return a mask with the end token that follows each answer, where the answer has none itself."""
    learnt, ended = list(mask), False
    for number in range(1, len(ids)):
        if mask[number]:
            ended = ids[number] in ends or (ended and mask[number - 1])
        elif mask[number - 1] and not ended:
            learnt[number] = ids[number] in ends
    return learnt


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
