"""How much of the prompts one round reads, and of which ones."""

from collections.abc import Sequence

from redrafter.scheduler.sequence import TokenSequence

__all__ = ["Pace", "Share", "choose", "cost"]

SECONDS = 0.25  # that a forward over prompts should take: as long, running texts and new ones wait for it
FIRST = 512  # tokens of the first forward, before any was measured
LEAST = 64  # tokens of a forward however slow the machine is; fewer would take about as long
FASTER, SLOWER = 2.0, 0.25  # the most by which one forward changes the next

Share = tuple[TokenSequence, int]  # a text, and how many more tokens of its prompt are read


class Pace:
    """The tokens that a forward over prompts may have, so that it takes about `SECONDS`.

    It follows what forwards have taken, since that depends on the machine, the model and how long the texts are. What a
    text becomes does not depend on it.
    """

    def __init__(self, most: int):
        """Args:
        most: Tokens of a forward on any machine.
        """
        self._most = most
        self.tokens = min(FIRST, most)

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a forward over so many tokens."""
        fitting = tokens * SECONDS / max(seconds, 1e-6)
        if seconds <= SECONDS and 2 * tokens < self.tokens:
            return  # that few tokens are fast says nothing of many
        fitting = min(max(fitting, SLOWER * self.tokens), FASTER * self.tokens)
        self.tokens = min(max(round(fitting), LEAST), self._most)


class _Forward:
    """What the next forward reads, while it is being chosen."""

    def __init__(self, padded: bool):
        self._padded = padded
        self.shares: dict[TokenSequence, int] = {}
        self._total = self._longest = 0

    def take(self, sequence: TokenSequence, budget: int, whole: bool) -> None:
        """Read as much of a prompt as a forward of `budget` tokens has room for. whole: all of it or nothing."""
        before = self.shares.get(sequence, 0)
        room = budget - self._total + before
        if self._padded:
            room = budget // (len(self.shares) + (sequence not in self.shares))
            if self._longest > room:
                return
        left = sequence.prefill_length - sequence.prefilled
        share = min(left, room)
        if share > before and not (whole and share < left):
            self.shares[sequence] = share
            self._total += share - before
            self._longest = max(self._longest, share)


def choose(reading: Sequence[TokenSequence], budget: int, padded: bool, chunked: bool) -> list[list[Share]]:
    """Choose which prompts are read next, and how many tokens of each.

    Half of a forward is for the prompts that have the fewest tokens left, so that a short one never stands behind the
    pieces of a long one. The rest is for those that were admitted first, so that a long one gets on whatever comes.

    Args:
        reading: Texts whose prompts are not read yet, in the order of their admission; at least one.
        budget: Tokens of a forward.
        padded: Whether each text costs as many tokens as the longest one beside it.
        chunked: Whether a prompt may be read in deltas. If not, the one that was admitted first is read whole however
            long it is.

    Returns:
        The shares of each forward: of one, or of a second one for a whole prompt that is longer than `budget`.
    """
    forward = _Forward(padded)
    for sequence in sorted(reading, key=lambda sequence: sequence.prefill_length - sequence.prefilled):
        forward.take(sequence, max(budget // 2, 1), whole=not chunked)
    for sequence in reading:
        forward.take(sequence, budget, whole=not chunked)
    forwards = [list(forward.shares.items())] if forward.shares else []
    oldest = reading[0]
    if oldest not in forward.shares and not chunked:
        forwards.append([(oldest, oldest.prefill_length - oldest.prefilled)])
    return forwards


def cost(shares: Sequence[Share], padded: bool) -> int:
    """Count the tokens of a forward, padding included."""
    tokens = [share for _, share in shares]
    return len(tokens) * max(tokens) if padded else sum(tokens)
