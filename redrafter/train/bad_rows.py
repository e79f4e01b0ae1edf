"""Describe the rows of the data that a batch was made of, for a message about a loss that is not finite."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from redrafter.data.windows import Windows

__all__ = ["describe_bad_rows"]

MAX_NAMED_ROWS = 8
MAX_SHOWN_ROWS = 2  # of the named rows, those whose text is shown
MAX_SHOWN_CHARS = 40  # of the text of each


def describe_bad_rows(window_numbers: Iterable[int], windows: Windows, tokenizer: PreTrainedTokenizerBase) -> str:
    """Name the rows of some windows by file and line, in the order of the data, and show how the first ones begin.

    Args:
        window_numbers: Windows of a batch, by their numbers in the order of the data.
        windows: All windows.
        tokenizer: Decodes what is shown.
    """
    first_windows: dict[str, int] = {}  # by file and line, the first window of each row
    for number in sorted(window_numbers):
        first_windows.setdefault(windows.origins[number], number)
    shown = list(first_windows.values())[:MAX_SHOWN_ROWS]
    spans = ((windows.offsets[number], windows.offsets[number + 1]) for number in shown)
    beginnings = (windows.tokens[first : min(first + MAX_SHOWN_CHARS, last)] for first, last in spans)
    texts = [repr(str(tokenizer.decode(ids))[:MAX_SHOWN_CHARS]) for ids in beginnings]
    count = len(first_windows)
    more = f" and {count - MAX_NAMED_ROWS} more" if count > MAX_NAMED_ROWS else ""
    return f", in rows {', '.join(list(first_windows)[:MAX_NAMED_ROWS])}{more}, which begin with {', '.join(texts)}"
