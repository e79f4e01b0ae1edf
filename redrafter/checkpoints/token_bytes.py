"""Return the bytes that a token of a vocabulary encodes."""

import json
import re

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from redrafter.errors import UnsupportedError

SPACE = "▁"  # in vocabularies of sentencepiece
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# The byte of each character of byte-level BPE: printable ones are themselves, others come from 256 on.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


class TokenBytes:
    """Reads the pieces of a vocabulary as bytes. The vocabulary is byte-level BPE or like sentencepiece.

    Attributes:
        backend: The tokenizer, of the tokenizers library.
        byte_level: Whether pieces are written in the characters of byte-level BPE; else in sentencepiece's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Find out how a tokenizer writes pieces, or raise `UnsupportedError` if they cannot be read as bytes."""
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        both = () if backend is None else (backend.decoder, backend.pre_tokenizer)
        states = [part.__getstate__() for part in both if part is not None]
        parts = "".join(json.dumps(json.loads(state), ensure_ascii=False) for state in states)  # so `SPACE` is found
        self.byte_level = '"ByteLevel"' in parts
        kind = "it is not of the tokenizers library" if backend is None else f"it is {type(backend.model).__name__}"
        if backend is None or not (self.byte_level or SPACE in parts) or "WordPiece" in kind:
            message = f"its tokens cannot be written as bytes, as {kind} without byte-level or {SPACE!r} tokens"
            raise UnsupportedError(message)
        self.backend = backend

    def of_piece(self, piece: str) -> bytes | None:
        """Return the bytes of a piece of the vocabulary that is no added token; None if it does not encode any."""
        if self.byte_level:
            return bytes(map(_BYTE_OF.__getitem__, piece)) if _BYTE_OF.keys() >= {*piece} else None
        if (byte := BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace(SPACE, " ").encode()
