"""One text that is asked for, as the server sees it: the engine's own `TokenSequence` is in another process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SequenceDelta, Stats

__all__ = ["ServedSequence"]


@dataclass(eq=False)
class ServedSequence:
    """A prompt, and how far the text after it is.

    Attributes:
        prompt: Token ids.
        stop_token_ids: Ids that end the text.
        stats: Counts of its steps; the draw of its first token is none.
        find_stop: Called with the tokens of each delta; returns the index of the one that ends the text, or None.
        adapter: Name of its LoRA adapter; None for the model alone.
        reused: Leading tokens of the prompt that were in the cache already.
        prompt_scores: Scores of the prompt's tokens but the first, once it is read, if they were asked for.
        written: Number of tokens that were written.
        ended: Whether the last delta has come.
        arrived_at, first_token_at: When it was made and when its first token came, by `time.perf_counter`.
    """

    prompt: Sequence[int]
    stop_token_ids: frozenset[int]
    stats: Stats
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    adapter: str | None = None
    reused: int = 0
    prompt_scores: Sequence[PromptScore] = ()
    written: int = 0
    ended: bool = False
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    def append(self, delta: SequenceDelta) -> SequenceDelta:
        """Count a delta of the engine, and return as much of it as there is before the text ends.

        The engine knows of end tokens and lengths; stop strings are found here.
        """
        stop = None if self.find_stop is None else self.find_stop(delta.tokens)
        if stop is not None and delta.finish != "error":
            delta = _cut(delta, stop + 1)
        if self.written and delta.tokens:
            self.stats.count(delta.drafted, delta.accepted, len(delta.tokens))
        self.written += len(delta.tokens)
        self.ended = delta.finish is not None
        return delta


def _cut(delta: SequenceDelta, count: int) -> SequenceDelta:
    """Return the first tokens of a delta as the end of a text. count: how many."""
    logprobs = None if delta.logprobs is None else delta.logprobs[:count]
    accepted = min(delta.accepted, count)
    return replace(delta, tokens=delta.tokens[:count], accepted=accepted, logprobs=logprobs, finish="stop")
