"""Encode rows as documents, which are token ids with a loss mask.

Conversations are rendered with the tokenizer's chat template, and only the assistant's turns are learnt. Of a text all
tokens are learnt; of a prompt and its answer, the answer; of token ids, those that the row's own mask selects.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase as Tokenizer

from redrafter.chat.control_tokens import encode_plain
from redrafter.chat.messages import split_thought, text_after_answer
from redrafter.data.prompts import RowChat, Span, check_tokenizer, encode_texts, encode_with_offsets, ids_after
from redrafter.data.rows import Row
from redrafter.data.windows import Document
from redrafter.errors import CheckpointError

Encoded = tuple[list[int], list[bool]]  # token ids, and of each whether it is learnt
GROUP_CHARACTERS = 1_000_000  # of rows that are tokenized at once, on all cores
SHOWN_CHARACTERS = 200  # of a sample in an error


@dataclass(frozen=True)
class _Sample:
    """A text with answers to learn.

    Attributes:
        index: Number of its row in the group.
        row: The row.
        text: The text, which ends with an answer.
        spans: The answers in it.
        chat: The conversation that it was rendered of; None for plain text.
        closing: What a conversation would continue with.
    """

    index: int
    row: Row
    text: str
    spans: list[Span]
    chat: RowChat | None = None
    closing: str = ""

    def encode(self, end: int, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of the text up to a character."""
        text = self.text[:end]
        return encode_texts([(self.row, text)], tokenizer)[0] if self.chat is None else self.chat.encode(text)


def encode_documents(rows: Iterable[Row], tokenizer: Tokenizer, ends: Collection[int] = ()) -> Iterator[Document]:
    """Yield the documents of rows, in the order of the rows.

    The ids before an answer are those that the server gives the prompt. A row becomes one document, or several where
    the prompt of an answer does not continue the ids so far: where the chat template renders earlier turns differently
    as the conversation continues, or the tokenizer merges the end of a prompt with an answer. `ends` are the ids that
    end an answer of the base: where the template ends an answer with the mark of the next turn alone, as GLM's does,
    that mark is learnt if it is one of them.

    Raises:
        CheckpointError: If a row cannot be encoded or teaches nothing. The message names file and line.
        MismatchError: If a row has ids of another tokenizer.
    """
    for group in _groups(rows):
        documents: list[list[Document]] = [[] for _ in group]
        texts, samples = list[tuple[int, str]](), list[_Sample]()
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
                samples.append(_Sample(index, row, text, [(len(row.prompt), len(text))]))
            else:
                samples += _render(index, row, tokenizer)
        encoded = encode_texts([(group[index], text) for index, text in texts], tokenizer)
        for (index, _), ids in zip(texts, encoded, strict=True):
            documents[index].append(Document(ids, [True] * len(ids), group[index].where))
        for sample, parts in zip(samples, _encode_samples(samples, tokenizer), strict=True):
            closing = encode_plain(tokenizer, sample.closing)[:1] if sample.closing else []
            for ids, mask in parts:
                if sample.chat is not None:
                    ids, mask = _with_ends(ids, mask, closing, ends)
                documents[sample.index].append(Document(ids, mask, sample.row.where))
        for row, row_documents in zip(group, documents, strict=True):
            yield from _keep_learnable(row, row_documents, tokenizer)


def _encode_samples(samples: list[_Sample], tokenizer: Tokenizer) -> Iterator[Iterable[Encoded]]:
    """Yield the ids and masks that each sample becomes."""
    # At once and as a whole, which is fast and nearly always right: prompts mostly end at or near a control token.
    marked = [sample.chat is not None and sample.chat.is_marked(sample.text) for sample in samples]
    wholes = [sample for sample, spelt in zip(samples, marked, strict=True) if tokenizer.is_fast and not spelt]
    encoded = encode_with_offsets([(sample.row, sample.text) for sample in wholes], tokenizer) if wholes else []
    tokens = dict(zip(map(id, wholes), encoded, strict=True))
    control, encode_tail = {*tokenizer.added_tokens_decoder}, lru_cache(maxsize=64)(partial(encode_plain, tokenizer))

    def is_separate(sample: _Sample, start: int, ids: list[int], offsets: list[Span]) -> bool:
        """Return whether the prompt of the answer at `start` has the same ids alone as in the whole text."""
        count = bisect_right(offsets, start, key=itemgetter(1))
        # Text before a control token does not change the ids of what follows it.
        first = 0 if sample.chat is None else next((n for n in range(count - 1, 0, -1) if ids[n] in control), 0)
        alone = encode_tail(sample.text[offsets[first][0] : start]) if first else sample.encode(start, tokenizer)
        return alone == ids[first:count]

    for sample in samples:
        ids, offsets = tokens.get(id(sample), ([], []))
        if ids and all(is_separate(sample, start, ids, offsets) for start, _ in sample.spans):
            yield [(ids, _mask(sample.spans, offsets))]
        else:
            yield _encode_apart(sample, tokenizer)


def _encode_apart(sample: _Sample, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield ids with a mask: prompts as they are alone, each with the answer that follows; joined where possible."""
    ids, mask = list[int](), list[bool]()
    for start, end in sample.spans:
        prompt, whole = sample.encode(start, tokenizer), sample.encode(end, tokenizer)
        if prompt[: len(ids)] != ids:
            yield ids, mask
            mask = []
        encode = partial(encode_plain, tokenizer) if sample.chat is None else sample.chat.encode
        learnt = ids_after(prompt, whole, partial(encode, sample.text[start:end]))
        mask = mask + [False] * (len(prompt) - len(mask)) + [True] * len(learnt)
        ids = prompt + learnt
    yield ids, mask


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


def _keep_learnable(row: Row, documents: list[Document], tokenizer: Tokenizer) -> list[Document]:
    learnable = [document for document in documents if document.learnable]
    if learnable:
        return learnable
    if any(any(document.mask) for document in documents):
        raise CheckpointError(f"{row.where}: too short: two tokens in a row, after a first, are needed to learn from")
    sample = _decode(documents[0].ids if documents else [], tokenizer)[:SHOWN_CHARACTERS]
    raise CheckpointError(f"{row.where}: nothing to learn, its loss mask is empty; the sample is {sample!r}")


def _render(number: int, row: Row, tokenizer: Tokenizer) -> Iterator[_Sample]:
    """Yield the rendered texts of a conversation, the row `number` of its group, with their assistant turns.

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
    messages, chat, text, spans, end = row.messages, RowChat(row, tokenizer), "", list[Span](), 0

    def finished() -> _Sample:
        chat.warn_of_missing_turn(messages[:end], text)
        closing = text_after_answer(chat.template, bool(messages[end - 1].get("tool_calls")))
        return _Sample(number, row, text, spans, chat, closing)

    for index in learnt:
        prompt = chat.render(messages[:index], add_generation_prompt=True)
        # Some templates render earlier turns differently, such as without thoughts: then each answer is a sample.
        if spans and not prompt.startswith(text):
            yield finished()
            spans = []
        text, start = _answer(row, index, prompt, chat)
        spans, end = [*spans, (start, len(text))], index + 1
    yield finished()


def _answer(row: Row, index: int, prompt: str, chat: RowChat) -> tuple[str, int]:
    """Return a rendered conversation up to and with an assistant's turn, and where the answer to `prompt` begins in it.

    Stock templates do not mark what the assistant wrote. So the answer is what the conversation adds to the prompt that
    asks for it, or to that prompt with thoughts turned off: an empty thought is then no answer. Templates that open a
    thought in the prompt, and drop it from the turn, get the turn's own thought back.
    """
    assert row.messages is not None
    before, turn, marks = row.messages[:index], row.messages[index], chat.template.thoughts()
    thought, answer = split_thought(turn, marks)
    opened, closed = "", False  # the prompt without a thought that it opens, and whether it closes that too
    if marks is not None and prompt.rstrip().endswith((marks.begin.strip(), marks.end)):
        opened, _, rest = prompt.rpartition(marks.begin.strip())
        closed = marks.end in rest
    if closed and thought:  # thoughts are off
        turn = {key: value for key, value in turn.items() if "reasoning" not in key} | {"content": answer}
    answered = chat.render([*before, turn])
    asked, *others = chat.template.generation_prompts(row.template_kwargs or {})
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
        return f"{prompt}{chat.mark_answer(thought)}\n{marks.end}{space}{written}", len(prompt)
    raise CheckpointError(
        f"{row.where}: the chat template asks for the assistant's turn with {prompt[-40:]!r}, but does not write that "
        "turn so; let the base answer such rows by `redrafter regenerate`, and train on what that writes"
    )


def _mask(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Return of each token whether it ends within a span. Ends decide: a token's offsets may leave out its space."""
    bounds = [bound for span in spans for bound in span]  # rising; a token is inside where an odd number precede it
    return [bisect_left(bounds, end) % 2 == 1 for _, end in offsets]


def _with_ends(
    ids: list[int], mask: list[bool], closing: list[int], ends: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Return ids and their mask with the end token that follows each answer, where the answer has none itself.

    `closing` is the id that would follow the last answer, if any.
    """
    learnt, ended = list(mask), False
    for number in range(1, len(ids)):
        if mask[number]:
            ended = ids[number] in ends or (ended and mask[number - 1])
        elif mask[number - 1] and not ended:
            learnt[number] = ids[number] in ends
    closing = [] if ended or not any(mask[-1:]) else [token for token in closing if token in ends]
    return ids + closing, learnt + [True] * len(closing)


def format_sample(document: Document, tokenizer: Tokenizer) -> str:
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


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
