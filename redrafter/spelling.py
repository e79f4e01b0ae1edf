"""Suggestions for misspelt names of options."""

from collections.abc import Iterable

__all__ = ["nearest"]

SHORT_NAME_CHARS = 8  # a shorter name that differs in two letters is taken for another word


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to a misspelt one.

    A name may differ by one edit, a longer one by two. Leading dashes are ignored, and dashes and underscores are the
    same. A name and its negation (`--no-x`) are never close.

    Args:
        word: The name as it was typed.
        known: The names that exist.

    Returns:
        The closest name; None where no name is close enough or several are equally close.
    """
    negated, typed = _normalize(word)
    max_edits = 1 if len(typed) < SHORT_NAME_CHARS else 2
    normalized = {name: _normalize(name) for name in dict.fromkeys(known)}
    distances = {
        name: _edit_distance(typed, bare, max_edits) for name, (no, bare) in normalized.items() if no == negated
    }
    closest = min(distances.values(), default=max_edits + 1)
    names = [name for name, distance in distances.items() if distance == closest]
    return names[0] if closest <= max_edits and len(names) == 1 else None


def _normalize(word: str) -> tuple[bool, str]:
    """Return whether a name begins with `no-`, and the rest of it in lower case with dashes."""
    name = word.lstrip("-").replace("_", "-").lower()
    return name.startswith("no-"), name.removeprefix("no-")


def _edit_distance(word: str, other: str, max_edits: int) -> int:
    """Count the letters to insert, drop, change or swap with the next one (Damerau-Levenshtein distance).

    Words whose lengths alone differ by more than `max_edits` get `max_edits + 1`.
    """
    if abs(len(word) - len(other)) > max_edits:
        return max_edits + 1
    above, row = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        two_above, above, row = above, row, [i]
        for j, other_letter in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other_letter))
            if i > 1 and j > 1 and letter == other[j - 2] and word[i - 2] == other_letter:
                best = min(best, two_above[j - 2] + 1)
            row.append(best)
    return row[-1]
