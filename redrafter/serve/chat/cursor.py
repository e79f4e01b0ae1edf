"""Cursor over a text that is still being written."""

import re
from collections.abc import Generator

__all__ = ["Cursor", "Steps"]

Steps = Generator[None, None, bool]  # yields when it needs more text

_STRING = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class Cursor:
    """Base of parsers that read a text while it is written.

    Its methods are generators, which yield when they need more text.

    Attributes:
        text: The text so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._at = 0  # index of the next character to read
        self._last = False  # whether the text is complete

    def _flush(self) -> None:
        """Report what was read. Called before waiting for more text."""

    def _skip_value(self) -> Steps:
        """Move past a JSON value. Return False if the text ends before its end."""
        first, depth = self.text[self._at], 0
        if first not in '"{[':
            return (yield from self._find(_SCALAR_END)) or True
        while True:
            if not (yield from self._find(_NESTED)):
                return False
            mark = self.text[self._at]
            self._at += 1
            if mark == '"':
                if not (yield from self._skip_string()):
                    return False
            else:
                depth += 1 if mark in "{[" else -1
            if depth <= 0:
                return True

    def _skip_string(self) -> Steps:
        """Move past a JSON string whose opening quote was read. Return False if the text ends before its end."""
        while (yield from self._find(_STRING)):
            self._at += 1
            if self.text[self._at - 1] == '"':
                return True
            if not (yield from self._has_more()):
                return False
            self._at += 1
        return False

    def _find(self, pattern: re.Pattern[str]) -> Steps:
        """Move to the next match of a one-character pattern. Return False if there is none."""
        while (match := pattern.search(self.text, self._at)) is None:
            self._at = len(self.text)
            if not (yield from self._has_more()):
                return False
        self._at = match.start()
        return True

    def _skip(self, characters: str) -> Steps:
        """Move past any of some characters."""
        while (yield from self._has_more()) and self.text[self._at] in characters:
            self._at += 1
        return True

    def _skip_literal(self, literal: str) -> Steps:
        """Move past a literal if it comes next; else return False and stay."""
        begin = self._at
        for character in literal:
            if not (yield from self._has_more()) or self.text[self._at] != character:
                self._at = begin
                return False
            self._at += 1
        return True

    def _has_more(self) -> Steps:
        """Wait until there is a character to read. Return False at the end of the text."""
        while self._at == len(self.text):
            self._flush()
            if self._last:
                return False
            yield
        return True
