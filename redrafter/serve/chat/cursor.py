"""A place in a text that is still being written, and ways to go on from it."""

import re
from collections.abc import Generator

__all__ = ["Cursor", "Steps"]

Steps = Generator[None, None, bool]  # yields where it waits for more text

_STRING = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class Cursor:
    """Reads a text, and waits where it has not been written yet."""

    def __init__(self) -> None:
        self.text = ""
        self._at = 0  # where the reading stands
        self._last = False  # whether nothing follows the text

    def _flush(self) -> None:
        """Tell what was read; called before the reading waits."""

    def _value(self) -> Steps:
        """Go behind a value of JSON. False where the text ends before."""
        first, depth = self.text[self._at], 0
        if first not in '"{[':
            return (yield from self._find(_SCALAR_END)) or True
        while True:
            if not (yield from self._find(_NESTED)):
                return False
            mark = self.text[self._at]
            self._at += 1
            if mark == '"':
                if not (yield from self._string()):
                    return False
            else:
                depth += 1 if mark in "{[" else -1
            if depth <= 0:
                return True

    def _string(self) -> Steps:
        """Go behind a string of which the first quote was read."""
        while (yield from self._find(_STRING)):
            self._at += 1
            if self.text[self._at - 1] == '"':
                return True
            if not (yield from self._more()):
                return False
            self._at += 1
        return False

    def _find(self, pattern: re.Pattern[str]) -> Steps:
        """Go to the next match of one character. False at the end."""
        while (found := pattern.search(self.text, self._at)) is None:
            self._at = len(self.text)
            if not (yield from self._more()):
                return False
        self._at = found.start()
        return True

    def _skip(self, characters: str) -> Steps:
        while (yield from self._more()) and self.text[self._at] in characters:
            self._at += 1
        return True

    def _literal(self, mark: str) -> Steps:
        """Go behind a mark that stands here; else stay."""
        begin = self._at
        for character in mark:
            if not (yield from self._more()) or self.text[self._at] != character:
                self._at = begin
                return False
            self._at += 1
        return True

    def _more(self) -> Steps:
        """Wait until there is a character to read. False at the end."""
        while self._at == len(self.text):
            self._flush()
            if self._last:
                return False
            yield
        return True
