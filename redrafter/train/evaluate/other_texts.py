"""Texts to compare the base's own texts with: those that a drafter was trained on, and prompts in another form."""

import random
from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from redrafter.data.documents import encode_documents
from redrafter.data.prompts import encode_prompt
from redrafter.data.rows import Row, read_rows
from redrafter.data.windows import Windows
from redrafter.errors import ArgumentError
from redrafter.measure.prompts import read_prompts
from redrafter.train.config import DEFAULT_LENGTH
from redrafter.train.evaluate.texts import Texts

__all__ = ["prompts_in_both_forms", "read_training_texts"]

TRAINING_TEXTS = 64  # rows of the data that are read, and windows of them that are measured
FORM_PROMPTS = 8  # prompts that are measured with the chat template and without


def read_training_texts(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocabulary: int, context: int | None, seed: int
) -> Texts:
    """Read some texts of a drafter's training data, as training reads them.

    Args:
        files: Data of the training.
        tokenizer: The base's tokenizer.
        vocabulary: Ids that the base knows.
        context: Tokens of the base's context; None for no limit.
        seed: Seed of the choice.

    Returns:
        Each part of a text that is learnt, with all before it as its prompt.

    Raises:
        ArgumentError: There is no row to train on.
        CheckpointError: A row cannot be read or teaches nothing.
        MismatchError: A row has ids of another tokenizer.
    """
    rows = [row for row in read_rows(files) if row.split in (None, "train")]
    if not rows:
        raise ArgumentError(f"--data {' '.join(files)}: no row to train on; rows of split val and test are not")
    choice = random.Random(seed)
    choice.shuffle(rows)
    length = DEFAULT_LENGTH if context is None else min(DEFAULT_LENGTH, context)
    windows = Windows(encode_documents(rows[:TRAINING_TEXTS], tokenizer), length, tokenizer.bos_token_id, pack=False)
    windows.check(vocabulary, context)
    tokens, prompt_lengths = list[list[int]](), list[int]()
    for index in choice.sample(range(len(windows)), min(TRAINING_TEXTS, len(windows))):
        span = slice(int(windows.offsets[index]), int(windows.offsets[index + 1]))
        ids, end = windows.tokens[span].tolist(), 0
        for learnt, run in groupby(windows.mask[span].tolist()):
            begin, end = end, end + len(list(run))
            if learnt:
                tokens.append(ids[:end])
                prompt_lengths.append(begin)
    return Texts(tokens, prompt_lengths, [False] * len(tokens))


def prompts_in_both_forms(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    seed: int,
    *,
    share: float = 1.0,
    most: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Encode some prompts as plain text and as a user's turn of the chat template.

    Args:
        files: Files of prompts; the prompts that ship with the package if there are none.
        tokenizer: The base's tokenizer.
        max_tokens: Tokens of a prompt in either form; longer prompts are left out.
        seed: Seed of the choice.
        share: Share of the tokens of a row of text that is its prompt.
        most: Tokens of a row of text that are its prompt, at most.

    Returns:
        Token ids of the plain prompts, and of the same prompts in the template; none without a chat template.

    Raises:
        CheckpointError: A row cannot be read, or the template fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        return [], []
    sources: Sequence[str | None] = files or [None]
    rows = [row for file in sources for row in read_prompts(file)]
    random.Random(seed).shuffle(rows)
    plain, templated = list[list[int]](), list[list[int]]()
    for row in rows:
        if len(plain) == FORM_PROMPTS:
            break
        text = _text_of(row, tokenizer, share, most)
        turn = Row(row.where, messages=[{"role": "user", "content": text}])
        forms = [encode_prompt(form, tokenizer) for form in (Row(row.where, text=text), turn)]
        if all(0 < len(ids) <= max_tokens for ids in forms):
            plain.append(forms[0])
            templated.append(forms[1])
    return plain, templated


def _text_of(row: Row, tokenizer: PreTrainedTokenizerBase, share: float, most: int | None) -> str:
    """Return the text of a row's prompt without any template: of a conversation, the first user's turn."""
    if row.messages is not None:
        return next((turn["content"] for turn in row.messages if turn["role"] == "user"), "")
    ids = encode_prompt(row, tokenizer, text_share=share, max_text_tokens=most)
    return str(tokenizer.decode(ids, skip_special_tokens=True))
