"""Encode texts and conversations of rows, with errors that name the row."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.data.rows import Row, fingerprint
from redrafter.errors import CheckpointError, MismatchError, UnsupportedError, first_line

__all__ = ["Span", "apply_template", "check_tokenizer", "encode_texts"]

Span = tuple[int, int]  # first character, and the one after the last


def check_tokenizer(row: Row, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a row of token ids was made with the base's tokenizer, where the row says which.

    Raises:
        MismatchError: If it was made with another tokenizer.
    """
    if row.tokenizer is not None and row.tokenizer != fingerprint(tokenizer):
        raise MismatchError(
            f"{row.where}: made with tokenizer {row.tokenizer}, this base's is {fingerprint(tokenizer)}; make the row "
            "anew with this base"
        )


def apply_template(
    row: Row, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False
) -> str:
    """Render messages of a row with the tokenizer's chat template.

    Args:
        row: The row that the messages are from, for errors.
        messages: Messages with `role` and `content`.
        tokenizer: The base's tokenizer.
        add_generation_prompt: Whether to end with the beginning of an assistant's turn.

    Raises:
        CheckpointError: If there is no chat template, or it fails.
    """
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


def encode_texts(
    texts: list[tuple[Row, str]], tokenizer: PreTrainedTokenizerBase, offsets: bool = False
) -> list[tuple[list[int], list[Span]]]:
    """Return the token ids of each text and, if `offsets`, the span of each token.

    Special tokens are added, but not to a rendered conversation, or to a text that opens with the BOS token itself.

    Args:
        texts: Texts, each with the row that it was made from.
        tokenizer: The base's tokenizer.
        offsets: Whether to return spans of tokens; else the lists of spans are empty.

    Raises:
        CheckpointError: If the tokenizer fails on a text.
        UnsupportedError: If `offsets` is true and the tokenizer cannot say them.
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
