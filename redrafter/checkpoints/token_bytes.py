"""The bytes that each token of a tokenizer stands for, whatever alphabet its vocabulary is written in."""

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from redrafter.errors import UnsupportedError

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"  # in vocabularies of sentencepiece


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary by bytes.

    Attributes:
        of_id: The bytes of each id that is text.
        byte_ids: Ids that stand for one byte beside the ids of characters, as sentencepiece has them.
        special: Ids that are no text, by their names.
        model: What splits a word into tokens.
        byte_level: Whether the vocabulary is written in the characters of byte-level BPE; else in sentencepiece's.
    """

    of_id: dict[int, bytes]
    byte_ids: frozenset[int]
    special: dict[str, int]
    model: Any
    byte_level: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenBytes":
        """Read the vocabulary of a tokenizer.

        Raises:
            UnsupportedError: It is neither byte-level BPE nor like sentencepiece.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = "" if backend is None else _describe(backend.decoder) + _describe(backend.pre_tokenizer)
        byte_level = '"ByteLevel"' in parts
        kind = "it is not of the tokenizers library" if backend is None else f"it is {type(backend.model).__name__}"
        if backend is None or not (byte_level or SPACE in parts) or "WordPiece" in kind:
            raise UnsupportedError(
                f"its tokens cannot be told as bytes, as {kind} without byte-level or {SPACE!r} tokens"
            )
        added = tokenizer.added_tokens_decoder
        special = {token.content: id for id, token in added.items() if token.special}
        of_id = {id: token.content.encode() for id, token in added.items() if not token.special}
        byte_ids = set()
        for token, id in tokenizer.get_vocab().items():
            if id in added:
                continue
            byte = None if byte_level else _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                byte_ids.add(id)
                of_id[id] = bytes([int(byte[1], 16)])
            elif not byte_level:
                of_id[id] = token.replace(SPACE, " ").encode()
            elif all(character in _BYTE_OF for character in token):
                of_id[id] = bytes(_BYTE_OF[character] for character in token)
        return cls(of_id, frozenset(byte_ids), special, backend.model, byte_level)

    def by_bytes(self) -> dict[bytes, list[int]]:
        """Return the ids of each string of bytes: those of characters before those of single bytes, lowest first."""
        ids: dict[bytes, list[int]] = {}
        for id in sorted(self.of_id, key=lambda id: (id in self.byte_ids, id)):
            if self.of_id[id]:
                ids.setdefault(self.of_id[id], []).append(id)
        return ids

    def split(self, text: bytes) -> list[int]:
        """Return the ids that the tokenizer splits bytes into, in the midst of a text; none where it has no way to."""
        if self.byte_level:
            return [token.id for token in self.model.tokenize("".join(_CHARACTER_OF[byte] for byte in text))]
        try:
            return [token.id for token in self.model.tokenize(text.decode().replace(" ", SPACE))]
        except UnicodeDecodeError:  # part of a character
            by_byte = {self.of_id[id]: id for id in self.byte_ids}
            return [by_byte[text[i : i + 1]] for i in range(len(text)) if text[i : i + 1] in by_byte]


def _describe(part: Any) -> str:
    """Return the settings of a part of a tokenizer as JSON, with characters as they are."""
    return "" if part is None else json.dumps(json.loads(part.__getstate__()), ensure_ascii=False)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable ones are themselves, others come from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
