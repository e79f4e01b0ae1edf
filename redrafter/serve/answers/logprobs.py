"""Write tokens with their log-probabilities in OpenAI's formats of completions and of chats."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from redrafter.checkpoints.token_bytes import TokenBytes
from redrafter.engine.detokenizer import decode_tokens
from redrafter.errors import UnsupportedError


class TokenLine(NamedTuple):
    """A token of a text.

    Attributes:
        token: Its id.
        logprob: Its log-probability; None without a context.
        likeliest: Log-probabilities of the likeliest ids at its position.
        offset: Number of the text's characters before the token. A character belongs to the token that completes it.
        first: Whether it is the first token of the text.
    """

    token: int
    logprob: float | None
    likeliest: Mapping[int, float]
    offset: int
    first: bool


class TokenWriter:
    """Writes tokens of one tokenizer. The bytes of a text's tokens join to the text, except those of hidden tokens.

    Args:
        tokenizer: The tokenizer.
        hidden: Ids that the text does not show; None for all special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None = None):
        self._tokenizer, added = tokenizer, tokenizer.added_tokens_decoder
        self._added = {token: entry.content.encode() for token, entry in added.items()}
        self.hidden = {token for token, entry in added.items() if entry.special} if hidden is None else hidden
        self._pieces: TokenBytes | None = None
        with suppress(UnsupportedError):  # otherwise each token is what it decodes to by itself
            self._pieces = TokenBytes(tokenizer)

    def bytes(self, token: int, first: bool) -> bytes:
        """Return the bytes of a token; they may be part of a character. `first` marks the first token of a text."""
        if (text := self._added.get(token)) is not None:
            return text
        piece = None if self._pieces is None else self._pieces.backend.id_to_token(token)
        text = None if self._pieces is None or piece is None else self._pieces.of_piece(piece)
        if text is None:
            return decode_tokens(self._tokenizer, [token]).encode()
        # Tokenizers like sentencepiece drop the space at the beginning of a text.
        if first and text.startswith(b" ") and not decode_tokens(self._tokenizer, [token]).startswith(" "):
            return text[1:]
        return text

    def text(self, token: int, first: bool, prefix: str = "") -> str:
        r"""Return the text of a token. Bytes that are no text are written as `\xf0`, after `prefix`."""
        written = self.bytes(token, first)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return prefix + written.decode(errors="backslashreplace")

    def chat_entry(self, line: TokenLine) -> dict[str, Any]:
        """Return a token in the format of chats."""

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self.text(token, line.first)
            return {"token": text, "logprob": logprob, "bytes": list(self.bytes(token, line.first))}

        top = [entry(*pair) for pair in line.likeliest.items()]
        return entry(line.token, line.logprob) | {"top_logprobs": top}

    def completion_field(self, lines: list[TokenLine]) -> dict[str, Any]:
        """Return the `logprobs` field of a completion."""
        return {
            "text_offset": [line.offset for line in lines],
            "token_logprobs": [line.logprob for line in lines],
            "tokens": [self._name(line.token, line) for line in lines],
            "top_logprobs": [self._by_text(line) for line in lines],
        }

    def _name(self, token: int, line: TokenLine) -> str:
        return self.text(token, line.first, "bytes:")

    def _by_text(self, line: TokenLine) -> dict[str, float] | None:
        """Return log-probabilities by token text; the token itself is always included.

        Several tokens may have the same text: all but one are keyed `token_id:` with the id.
        """
        if line.logprob is None:
            return None
        logprobs = {self._name(line.token, line): line.logprob}
        for other, value in line.likeliest.items():
            if other != line.token:
                text = self._name(other, line)
                logprobs[f"token_id:{other}" if text in logprobs else text] = value
        return logprobs
