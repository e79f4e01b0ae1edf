"""How many prompt tokens one round reads, and of which prompts."""

from collections.abc import Sequence

from redrafter.scheduler.sequence import TokenSequence

__all__ = ["Chunk", "PrefillPace", "choose_chunks", "padded_tokens"]

TARGET_SECONDS = 0.25  # duration of a prefill forward; running and new sequences wait as long for it
# Tokens of the first forward, before any was measured, by type of device.
FIRST_FORWARD_TOKENS = {"cpu": 512, "cuda": 2048}
MIN_FORWARD_TOKENS = 64  # tokens of a forward on any machine, however slow; fewer would take about as long
MAX_GROWTH, MIN_GROWTH = 2.0, 0.25  # factors by which one measurement may change the size of the next forward

Chunk = tuple[TokenSequence, int]  # a sequence, and how many more tokens of its prompt are read


class PrefillPace:
    """How many tokens a prefill forward may have, so that it takes about `TARGET_SECONDS`.

    The number follows the measured durations, since these depend on the machine, the model and the lengths of the
    sequences. The tokens that are drawn do not depend on it.

    Attributes:
        tokens: Tokens that the next forward may have.
    """

    def __init__(self, max_num_tokens: int, device: str = "cpu"):
        """Begin at `FIRST_FORWARD_TOKENS`.

        Args:
            max_num_tokens: Tokens of a forward on any machine, however fast.
            device: Type of the device.
        """
        self._max_num_tokens = max_num_tokens
        self.tokens = min(FIRST_FORWARD_TOKENS.get(device, FIRST_FORWARD_TOKENS["cuda"]), max_num_tokens)

    def measure(self, tokens: int, seconds: float) -> None:
        """Adapt the size of the next forward to the duration of one over so many tokens."""
        fitting = tokens * TARGET_SECONDS / max(seconds, 1e-6)
        if seconds <= TARGET_SECONDS and 2 * tokens < self.tokens:
            return  # that few tokens are fast says nothing of many
        fitting = min(max(fitting, MIN_GROWTH * self.tokens), MAX_GROWTH * self.tokens)
        self.tokens = min(max(round(fitting), MIN_FORWARD_TOKENS), self._max_num_tokens)


class _ForwardPlan:
    """The chunks of the next forward, while they are being chosen."""

    def __init__(self, padded: bool):
        self._padded = padded
        self.counts: dict[TokenSequence, int] = {}
        self._total = self._longest = 0

    def add(self, sequence: TokenSequence, budget: int, whole: bool) -> None:
        """Add as much of a prompt as a forward of `budget` tokens has room for. whole: all of it or nothing."""
        before = self.counts.get(sequence, 0)
        free = budget - self._total + before
        if self._padded:
            free = budget // (len(self.counts) + (sequence not in self.counts))
            if self._longest > free:
                return
        left = sequence.prefill_length - sequence.prefilled
        count = min(left, free)
        if count > before and not (whole and count < left):
            self.counts[sequence] = count
            self._total += count - before
            self._longest = max(self._longest, count)


def choose_chunks(prefilling: Sequence[TokenSequence], budget: int, padded: bool, chunked: bool) -> list[list[Chunk]]:
    """Choose which prompts are read next, and how many tokens of each.

    Half of a forward is for the prompts that have the fewest tokens left, so that a short one never waits for the
    chunks of a long one. The rest is for those that were admitted first, so that a long one advances in any case.

    Args:
        prefilling: Sequences whose prompts are not in the cache yet, in the order of their admission; at least one.
        budget: Tokens of a forward.
        padded: Whether each sequence costs as many tokens as the longest one beside it.
        chunked: Whether a prompt may be read in chunks. If not, the one that was admitted first is read whole however
            long it is.

    Returns:
        The chunks of each forward, in the order of arrival: of one forward, or also of a second one for a whole prompt
        that is longer than `budget`.
    """
    plan = _ForwardPlan(padded)
    for sequence in sorted(prefilling, key=lambda sequence: sequence.prefill_length - sequence.prefilled):
        plan.add(sequence, max(budget // 2, 1), whole=not chunked)
    for sequence in prefilling:
        plan.add(sequence, budget, whole=not chunked)
    forwards = [sorted(plan.counts.items(), key=lambda chunk: chunk[0].arrival)] if plan.counts else []
    oldest = prefilling[0]
    if oldest not in plan.counts and not chunked:
        forwards.append([(oldest, oldest.prefill_length - oldest.prefilled)])
    return forwards


def padded_tokens(chunks: Sequence[Chunk], padded: bool) -> int:
    """Count the tokens of a forward, with those of padding if it is padded."""
    counts = [count for _, count in chunks]
    return len(counts) * max(counts) if padded else sum(counts)
