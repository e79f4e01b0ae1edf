"""Names that somebody may have meant: of the same meaning and misspelt, or none."""

from collections.abc import Iterable

__all__ = ["nearest"]

SHORT_NAME_CHARS = 8  # characters; a shorter name that differs in two is another word


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the one name that is a slip or two away from `word`; None where there is none or more than one.

    Dashes in front do not count, nor whether words are joined by dashes or underscores. A name and its negation are
    never a slip apart.
    """
    negated, typed = _plain(word)
    most = 1 if len(typed) < SHORT_NAME_CHARS else 2
    plain = {name: _plain(name) for name in dict.fromkeys(known)}
    distances = {name: _distance(typed, other, most) for name, (no, other) in plain.items() if no == negated}
    closest = min(distances.values(), default=most + 1)
    names = [name for name, distance in distances.items() if distance == closest]
    return names[0] if closest <= most and len(names) == 1 else None


def _plain(word: str) -> tuple[bool, str]:
    """Return whether a name says no to something, and to what."""
    name = word.lstrip("-").replace("_", "-").lower()
    return name.startswith("no-"), name.removeprefix("no-")


def _distance(one: str, other: str, most: int) -> int:
    """Count letters to insert, drop, change or swap with the next; `most + 1` where lengths alone are further apart."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, row = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, row, older = row, [i], before
        for j, their in enumerate(other, 1):
            best = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != their))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == their:
                best = min(best, older[j - 2] + 1)
            row.append(best)
        before = above
    return row[-1]
