"""Text of one choice as its tokens come, up to a stop string, of which nothing is shown."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer

__all__ = ["StopStrings", "TextStream", "text_of"]


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)  # a list for a list of lists
    return text


class StopStrings:
    """For the engine: after which of a step's tokens the text holds a stop string. As transformers' own criterion, it
    looks at the whole text that was written, so that one may begin in one token and end in another."""

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self._stops, self._longest = stops, max(map(len, stops))
        self._detokenizer, self._tail = Detokenizer(tokenizer), ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        for index, token in enumerate(tokens):
            self._tail += self._detokenizer.push([token])
            if any(stop in self._tail for stop in self._stops):
                return index
            self._tail = self._tail[-self._longest :]
        return None


class TextStream:
    """`push` tokens, get the text that is sure: what may be the beginning of a stop string is held back.

    A character that a draft and the target's own token share is of the one that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._detokenizer, self._stops = Detokenizer(tokenizer), stops
        self._held = ""
        self._drafted = bytearray()  # of each character of the text and of what is held
        self._told = 0  # characters that `runs` told
        self.text = ""

    def push(self, tokens: Sequence[int], last: bool = False, accepted: int = 0) -> str:
        """The new text. last: nothing follows, so that nothing is held back. accepted: how many of the tokens, the
        first ones, were drafts; only `runs` asks for it."""
        self._hold(self._detokenizer.push(tokens[:accepted]), True)
        self._hold(self._detokenizer.push(tokens[accepted:]), False)
        if last:
            self._hold(self._detokenizer.finish(), False)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            ready, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if last else self._beginning()
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += ready
        return ready

    def runs(self) -> list[tuple[str, bool]]:
        """The text since the last call in runs, and whether drafts wrote them."""
        start, self._told = self._told, len(self.text)
        return self.runs_of(start, self._told)

    def runs_of(self, begin: int, end: int) -> list[tuple[str, bool]]:
        """Some characters of the text in runs, and whether drafts wrote them."""
        marked = zip(self._drafted[begin:end], self.text[begin:end], strict=True)
        return [("".join(text for _, text in run), bool(own)) for own, run in groupby(marked, key=itemgetter(0))]

    def _hold(self, text: str, drafted: bool) -> None:
        self._held += text
        self._drafted += bytes([drafted]) * len(text)

    def _beginning(self) -> int:
        """How many characters at the end may begin a stop string."""
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(sizes, default=0)
