"""Store finished sequences for a while, so that later sequences with the same salt can be drafted from them.

A prompt is repeated, an answer is requested again with a small change, a report is written every day: the continuation
was generated before. The host looks up the last tokens of a running sequence, and copies the matching piece of a
finished sequence to its row. Each step finds the row's position within that piece (`drafting/prompt_lookup.py`): so no
lookup is needed while copies are accepted, and a captured step reads tensors of one shape.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from redrafter.cache.to_device import to_device

# Numbers of last tokens by which a text is found, the most first. Many are needed where a chat template ends prompts
# alike, few where a text was changed a moment ago.
KEYS = (16, 4)
PIECE = 512  # tokens that a row is given
LEAST_LEFT = 64  # tokens of a piece that must be left; with fewer, the row gets the next piece
MOST_TOKENS = 1 << 17  # of all salts together, about 25 MB with their index
MOST_TOKENS_OF_SALT = 1 << 15


@dataclass(frozen=True)
class CopySource:
    """A part of a finished sequence: the sequence's number, the part's offset, and its tokens."""

    text: int
    begin: int
    tokens: Sequence[int]


@dataclass
class _Texts:
    """The finished sequences of one salt, oldest first, with an index of positions by the preceding tokens."""

    texts: "OrderedDict[int, array[int]]" = field(default_factory=OrderedDict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # number of a text, and where the next token is
    tokens: int = 0

    def add(self, number: int, text: Sequence[int]) -> None:
        self.texts[number] = array("i", text)
        # Later sequences replace the positions of earlier ones: the latest continuation is the likeliest.
        self.places |= {key: (number, end) for key, end in _keys(text)}
        self.tokens += len(text)
        while self.tokens > MOST_TOKENS_OF_SALT:
            number, oldest = self.texts.popitem(last=False)
            # Dropping the oldest keeps the memory of one salt bounded.
            self.tokens -= len(oldest)
            for key, _ in _keys(oldest):
                if self.places.get(key, (-1, 0))[0] == number:  # no later text has these tokens
                    del self.places[key]


def _keys(text: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the key and the position of each token of a text with tokens before it.

    A hash collision costs only a useless draft.
    """
    whole = tuple(text)
    for count in KEYS:
        for end in range(count, len(whole)):
            yield hash(whole[end - count : end]), end


class FinishedTexts:
    """Keeps the latest finished sequences by salt. A lookup never crosses salts.

    Attributes:
        tokens: Number of tokens that are kept.
    """

    def __init__(self) -> None:
        self._by_salt: OrderedDict[Hashable, _Texts] = OrderedDict()  # the one used last at the end
        self._number = self.tokens = 0

    @property
    def places(self) -> int:
        """Number of entries of the indices."""
        return sum(len(texts.places) for texts in self._by_salt.values())

    def add(self, salt: Hashable, prompt: Sequence[int], text: Sequence[int]) -> None:
        """Keep a text and the end of the prompt before it, and forget others where they are too many."""
        # Include the end of the prompt, which precedes and so identifies the first generated tokens.
        kept = [*prompt[-KEYS[0] :], *text][:MOST_TOKENS_OF_SALT]
        self._number += 1
        texts = self._by_salt.setdefault(salt, _Texts())
        # `add` may also drop texts of the salt, so the total is corrected by the difference.
        self.tokens -= texts.tokens
        texts.add(self._number, kept)
        self.tokens += texts.tokens
        self._by_salt.move_to_end(salt)
        while self.tokens > MOST_TOKENS:
            _, oldest = self._by_salt.popitem(last=False)
            self.tokens -= oldest.tokens

    def find(self, salt: Hashable, tokens: Sequence[int], known: CopySource | None) -> CopySource | None:
        """Return a piece of the latest text of the salt that has the last of these tokens, as many as possible.

        Returns None if there is none, or if the piece `known` still suffices.
        """
        if (found := self._by_salt.get(salt)) is None:
            return None
        for count in KEYS:
            place = found.places.get(hash(tuple(tokens[-count:]))) if len(tokens) >= count else None
            if place is None:
                continue
            number, end = place
            text, begin = found.texts[number], max(end - KEYS[0], 0)
            # Keep the piece while enough of it is left: writing a new one costs a copy to the device.
            if known is not None and known.text == number and known.begin <= begin:
                last = known.begin + len(known.tokens)
                if end + LEAST_LEFT <= last or last == len(text):
                    return None
            return CopySource(number, begin, text[begin : begin + PIECE])
        return None

    def clear(self) -> None:
        """Remove all sequences."""
        self._by_salt.clear()
        self.tokens = 0


def write_pieces(pieces: Tensor | None, given: Mapping[int, CopySource]) -> None:
    """Copy pieces into the rows, by number, that they were given to, of `pieces` `[B, R]` int64."""
    assert pieces is not None, "who gives pieces makes room for them"
    if given:
        rows = to_device([*given], pieces.device, pieces.dtype)
        # One copy for all rows, as each launch costs the host time.
        padded = [[*piece.tokens, *[0] * (pieces.shape[1] - len(piece.tokens))] for piece in given.values()]
        pieces[rows] = to_device(padded, pieces.device, pieces.dtype)
