"""Turn the tokens of one choice into text as they come, up to a stop string, which is left out."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from redrafter.engine.detokenizer import Detokenizer

__all__ = ["StopStrings", "TextStream"]


class StopStrings:
    """Find stop strings in a text as the engine writes it.

    Call it with the tokens of each step: it returns the index of the token after which the text contains a stop string,
    or None. A stop string may begin in one token and end in another, as for the stopping criterion of transformers.

    Args:
        stops: Stop strings; at least one.
        tokenizer: The model's tokenizer.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self._stops, self._longest = stops, max(map(len, stops))
        self._detokenizer, self._tail = Detokenizer(tokenizer), ""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return the index of the token after which the text contains a stop string; None where it does not."""
        for index, token in enumerate(tokens):
            self._tail += self._detokenizer.push([token])
            if any(stop in self._tail for stop in self._stops):
                return index
            self._tail = self._tail[-self._longest :]
        return None


class TextStream:
    """Decode tokens to text as they come, and hold back what may be the beginning of a stop string.

    A character whose bytes come from a draft and from the target's own token counts for the token that completes it.

    Args:
        tokenizer: The model's tokenizer.
        stops: Stop strings.

    Attributes:
        text: The text so far, without what is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._detokenizer, self._stops = Detokenizer(tokenizer), stops
        self._held = ""
        self._drafted = bytearray()  # of each character of the text and of what is held: whether a draft wrote it
        self._reported = 0  # characters that `new_runs` has returned
        self.text = ""

    def push(self, tokens: Sequence[int], last: bool = False, accepted: int = 0) -> str:
        """Return the text that these tokens make certain.

        Args:
            tokens: New token ids.
            last: Whether no more tokens follow, so that nothing is held back.
            accepted: How many of the first tokens were accepted drafts; only `runs` and `new_runs` need it.
        """
        self._hold(self._detokenizer.push(tokens[:accepted]), True)
        self._hold(self._detokenizer.push(tokens[accepted:]), False)
        if last:
            self._hold(self._detokenizer.finish(), False)
        stop_indices = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if stop_indices:
            ready, self._held = self._held[: min(stop_indices)], ""
        else:
            keep = 0 if last else self._partial_stop()
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += ready
        return ready

    def new_runs(self) -> list[tuple[str, bool]]:
        """Return the text since the last call as runs, each with whether drafts wrote it."""
        start, self._reported = self._reported, len(self.text)
        return self.runs(start, self._reported)

    def runs(self, begin: int, end: int) -> list[tuple[str, bool]]:
        """Return characters `begin` to `end` of the text as runs, each with whether drafts wrote it."""
        marked = zip(self._drafted[begin:end], self.text[begin:end], strict=True)
        return [
            ("".join(text for _, text in run), bool(drafted)) for drafted, run in groupby(marked, key=itemgetter(0))
        ]

    def _hold(self, text: str, drafted: bool) -> None:
        self._held += text
        self._drafted += bytes([drafted]) * len(text)

    def _partial_stop(self) -> int:
        """Return how many characters at the end of the held text may be the beginning of a stop string."""
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(sizes, default=0)
