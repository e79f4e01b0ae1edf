"""Which rows of the data a loss was computed from, to be named when it is no number."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from redrafter.data.windows import Windows

__all__ = ["told"]

NAMED, SHOWN, LETTERS = 8, 2, 40  # rows named, and of these shown, and so much of each


def told(held: Iterable[int], windows: Windows, tokenizer: PreTrainedTokenizerBase) -> str:
    """The rows that some windows are of, by file and line in the order of the data, and how some of them begin."""
    found: dict[str, int] = {}
    for number in sorted(held):
        found.setdefault(windows.origins[number], number)
    spans = ((windows.offsets[number], windows.offsets[number + 1]) for number in list(found.values())[:SHOWN])
    beginnings = (windows.tokens[first : min(first + LETTERS, last)] for first, last in spans)
    shown = [repr(str(tokenizer.decode(ids))[:LETTERS]) for ids in beginnings]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f", in rows {', '.join(list(found)[:NAMED])}{more}, which begin with {', '.join(shown)}"
