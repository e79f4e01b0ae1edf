"""A detokenizer for tokens that arrive a few at a time."""

from collections.abc import Collection, Sequence
from typing import TypeGuard

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from redrafter.errors import ReDrafterError, first_line

CONTEXT_TOKENS = 8  # decoded together with a new token, for leading spaces and characters split between tokens
MAX_WINDOW_TOKENS = 64  # tokens after which incomplete bytes are output as they are
MAX_PARTIAL_BYTES = 3  # bytes that may still become a character
REPLACEMENT = "\ufffd"  # decoded form of invalid or incomplete UTF-8


class DecodingError(ReDrafterError):
    """A tokenizer has failed to decode token ids that it knows."""


def decode_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Return the text of token ids. Ids unknown to the tokenizer, as of a padded embedding, decode to nothing.

    Raises:
        DecodingError: The tokenizer's own code has failed.
    """
    try:
        if _only_calls_backend(tokenizer):  # called for every chunk of a stream: the layers take twice its time
            text: str | list[str] = tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        else:
            text = tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
    except Exception as error:  # fast tokenizers skip unknown ids; slow ones and remote code may raise anything
        known = [token for token in tokens if token < len(tokenizer)]
        if len(known) < len(tokens):
            return decode_tokens(tokenizer, known, skip_special_tokens)
        why = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise DecodingError(f"the tokenizer failed to decode {len(tokens)} tokens ({why})") from error
    assert isinstance(text, str)  # a list for a list of lists
    return text


def decode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[int]]) -> list[str]:
    """Return what `decode_tokens` returns for each of many texts, on several cores where the tokenizer can."""
    if _only_calls_backend(tokenizer):
        return tokenizer.backend_tokenizer.decode_batch(texts, skip_special_tokens=False)
    return [decode_tokens(tokenizer, text) for text in texts]


def _only_calls_backend(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Return whether `decode` is that of transformers, and changes nothing in the text of the tokenizers library."""
    return (
        getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
        and getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode  # noqa: SLF001
        and not tokenizer.clean_up_tokenization_spaces
    )


class Detokenizer:
    """Decodes tokens as they arrive, into pieces of text that join to `decode` of all tokens, without special ones.

    A window of the last tokens is decoded again and its growth is the new text, so the work per token does not grow
    with the text. Bytes that end within a character are held back, so that no piece contains a part of one.

    Args:
        tokenizer: The tokenizer.
        hidden: Ids that are skipped; None for all special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self._tokenizer, self._hidden = tokenizer, hidden
        self._window: list[int] = []
        self._sent = 0  # number of characters of the window's text already returned

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text that they complete."""
        # Hidden ids are dropped before decoding, as `skip_special_tokens` would hide all special ones.
        if self._hidden is not None:
            tokens = [token for token in tokens if token not in self._hidden]
        if not tokens:
            return ""
        self._window.extend(tokens)
        text = self._decode(self._window)
        # A replacement character at the end may be the beginning of a character that the next token completes.
        held = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) > MAX_WINDOW_TOKENS:
            held = min(held, MAX_PARTIAL_BYTES)
        ready = len(text) - held
        new = text[self._sent : ready]
        # Decoding more tokens may shorten the text, and returned text cannot be taken back.
        self._sent = max(self._sent, ready)
        if self._sent == ready and len(self._window) >= 2 * CONTEXT_TOKENS:
            self._shorten(held)
        return new

    def finish(self) -> str:
        """Return the text that is still held back."""
        new = self._decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return new

    def _shorten(self, held: int) -> None:
        # A byte-fallback tokenizer spoils a whole run of bytes when it begins within a character, and no character
        # has more than MAX_PARTIAL_BYTES bytes after its first: one of these windows starts at a character.
        for count in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_PARTIAL_BYTES + 1):
            tail = self._window[-count:]
            ready = len(text := self._decode(tail)) - held
            if ready > 0 and REPLACEMENT not in text[:ready]:
                self._window, self._sent = tail, ready
                return
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = max(len(self._decode(self._window)) - held, 0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode_tokens(self._tokenizer, tokens, skip_special_tokens=self._hidden is None)
