"""Which texts a loss was computed from, to be named when it is no number."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redrafter.train.data.windows import Batch, Windows

__all__ = ["told"]

NAMED, SHOWN, LETTERS = 8, 2, 40  # windows named, and of these shown, and so much of each


def told(batches: Iterable[Batch], windows: Windows, tokenizer: PreTrainedTokenizerBase) -> str:
    """The windows of some batches, by their numbers in the order of the data, from 0, and how some of them begin."""
    found = {_find(windows, ids): ids for batch in batches for ids in _texts(batch)}
    found.pop(None, None)  # padding
    shown = [repr(str(tokenizer.decode(ids[:LETTERS]))[:LETTERS]) for ids in list(found.values())[:SHOWN]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f", in windows {', '.join(map(str, list(found)[:NAMED]))}{more}, which begin with {', '.join(shown)}"


def _find(windows: Windows, ids: Tensor) -> int | None:
    """The first window that holds exactly these tokens."""
    found = (windows.lengths == len(ids)).nonzero().squeeze(1)
    for place, token in enumerate(ids):
        found = found[windows.tokens[windows.ends[found] + place] == token]
    return int(found[0]) if len(found) else None


def _texts(batch: Batch) -> Iterator[Tensor]:
    """The tokens of each window, and of the padding."""
    for tokens, segment in zip(batch.tokens, batch.segment, strict=True):
        for number in segment.unique():
            yield tokens[segment == number]
