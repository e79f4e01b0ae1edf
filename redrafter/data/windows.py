"""Windows of documents, and batches of windows.

Documents are cut into windows of at most `length` tokens. Where most are shorter, a batch of one window a row would be
mostly padding; so several share a row of exactly `length`. `Batch.segment` tells them apart, for the base must not read
from one into the next, and the mask is 0 at the first token of each, so that no rollout crosses over.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.errors import ArgumentError, MismatchError

__all__ = ["Batch", "Document", "Windows", "best_fit"]

POOL = 32  # batches among which rows are sorted by width, so that a batch holds little padding
STRIDE = 1_000_003  # between the generators of two seeds; more than the epochs of any training


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them the base itself is to write. where: the file and line of its row."""

    ids: list[int]
    mask: list[bool]
    where: str = field(default="", compare=False)

    @property
    def learnable(self) -> bool:
        """Whether there is a rollout in it: two tokens in a row to write, after a first."""
        return bytes(self.mask).find(b"\1\1", 1) >= 0


class Batch(NamedTuple):
    """tokens: `[B, T]` int64. mask: `[B, T]` bool, the tokens that the base itself is to write. segment: `[B, T]`
    int64, the number of the window within its row; padding at the end of a row has the number after the last."""

    tokens: Tensor
    mask: Tensor
    segment: Tensor


class Windows:
    """Documents cut into windows of at most `length` tokens. A window never holds two documents.

    bos: where a document opens with this id, so does each of its windows, as every prompt of the base will. pack: rows
    of a batch hold as many windows as fit into `length`; else one each, right-padded to the longest of the batch.
    places: where each window's document stands.
    """

    def __init__(self, documents: Iterable[Document], length: int, bos: int | None = None, pack: bool = True):
        tokens, masks, ends = array("i"), bytearray(), array("q", [0])
        self.places: list[str] = []
        for document in documents:
            opening = [bos] if bos is not None and document.ids[:1] == [bos] else []
            room = length - len(opening)
            for first in range(len(opening), len(document.ids), room):
                ids = opening + document.ids[first : first + room]
                mask = [False] * len(opening) + document.mask[first : first + room]
                if Document(ids, mask).learnable:
                    tokens.extend(ids)
                    masks.extend([False, *mask[1:]])  # nothing that stands before it could draw the first token
                    ends.append(len(tokens))
                    self.places.append(document.where)
        self.tokens = (
            torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.empty(0, dtype=torch.int32)
        )  # [M]
        self.mask = torch.frombuffer(masks, dtype=torch.bool) if masks else torch.empty(0, dtype=torch.bool)  # [M]
        self.ends = torch.frombuffer(ends, dtype=torch.int64)  # [windows + 1]
        self.lengths = self.ends.diff()  # [windows]
        # Which rows there are depends on the lengths alone. So it is the same in each epoch; what is shuffled is which
        # of the windows of one length stands for it, and the order of the rows.
        sizes = self.lengths.sort(descending=True).values
        row = torch.tensor(best_fit(sizes.tolist(), length), dtype=torch.int64) if pack else torch.arange(len(self))
        self.slots = row.argsort(stable=True)  # [windows], indices into windows sorted by length, row after row
        self.starts = pad(row.bincount().cumsum(0), (1, 0))  # [rows + 1], of each row's part of slots
        self.widths = torch.full_like(self.starts[1:], length) if pack else sizes  # [rows]

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, vocab_size: int, context: int | None) -> None:
        """Raise `MismatchError` naming the row of an id that a base does not know, and `ArgumentError` for rows of a
        batch that are longer than its context."""
        worst = int(self.tokens.argmax())
        if int(self.tokens[worst]) >= vocab_size:
            where = self.places[int(torch.searchsorted(self.ends, worst, right=True)) - 1]
            raise MismatchError(
                f"{where}: token id {int(self.tokens[worst])}, but the base knows {vocab_size} ids; use the base's own "
                "tokenizer"
            )
        if context is not None and int(self.widths.max()) > context:
            raise ArgumentError(
                f"rows of {int(self.widths.max())} tokens are more than the base's context of {context}; make --length "
                f"{context} or less"
            )

    def counts(self, vocab_size: int) -> Tensor:
        """How often each id is to be written, `[V]`."""
        return self.tokens[self.mask].long().bincount(minlength=vocab_size)

    def steps_per_epoch(self, size: int, processes: int = 1) -> int:
        """Batches of `size` rows that each process sees in an epoch: as many as bring every window up."""
        return -(-len(self.widths) // (size * processes))

    def batches(self, size: int, seed: int, process: int = 0, processes: int = 1, start: int = 0) -> Iterator[Batch]:
        """Endless batches of `size` rows, for one of some processes, which share the rows of each epoch out.

        start: batches of this process that are left out, as if they had been drawn, at the cost of at most an epoch's
        shuffle. There must be a window.
        """
        for width, rows in self._drawn(size, seed, process, processes, start):
            made = [self._row(windows, width) for windows in rows]
            yield Batch(*(torch.stack(parts) for parts in zip(*made, strict=True)))

    def held(self, size: int, seed: int, process: int = 0, processes: int = 1, start: int = 0) -> Iterator[list[int]]:
        """The windows that each of these batches holds, by their numbers in the order of the data."""
        return (torch.cat(rows).tolist() for _, rows in self._drawn(size, seed, process, processes, start))

    def _drawn(
        self, size: int, seed: int, process: int, processes: int, start: int
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """The width of each batch, and the windows of each of its rows."""
        epoch, skipped = divmod(start, self.steps_per_epoch(size, processes))
        for number in count(epoch):
            windows, made = self._epoch(number, size, seed, processes)
            for rows in made[process::processes][skipped:]:
                spans = zip(self.starts[rows].tolist(), self.starts[rows + 1].tolist(), strict=True)
                yield int(self.widths[rows].max()), [windows[first:last] for first, last in spans]
            skipped = 0

    def _epoch(self, epoch: int, size: int, seed: int, processes: int) -> tuple[Tensor, list[Tensor]]:
        """The windows of all rows, row after row, and the rows of each batch, all processes' in turn."""
        random = torch.Generator().manual_seed((seed * STRIDE + epoch) % 2**63)
        windows = torch.randperm(len(self), generator=random)
        windows = windows[self.lengths[windows].argsort(descending=True, stable=True)][self.slots]
        order = torch.randperm(len(self.widths), generator=random)
        total = self.steps_per_epoch(size, processes) * size * processes
        order = order.repeat(-(-total // len(order)))[:total]  # wraps around, to fill the last batches
        pools = (pool[self.widths[pool].argsort(stable=True)] for pool in order.split(POOL * size))
        made = [batch for pool in pools for batch in pool.split(size)]
        return windows, [made[index] for index in torch.randperm(len(made), generator=random).tolist()]

    def _row(self, windows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, mask and segments of some windows side by side, each `[width]`."""
        spans = list(zip(self.ends[windows].tolist(), self.ends[windows + 1].tolist(), strict=True))
        tokens, mask = (torch.cat([each[first:last] for first, last in spans]) for each in (self.tokens, self.mask))
        segment = torch.arange(len(windows)).repeat_interleave(self.lengths[windows])
        rest = (0, width - len(tokens))
        return pad(tokens.long(), rest), pad(mask, rest), pad(segment, rest, value=len(windows))


def best_fit(sizes: list[int], room: int) -> list[int]:
    """Which row each size goes to, when a row has `room` and each goes where it leaves least of it: 0, 1, 2, ...

    Sizes are at most `room`. In falling order they waste least.
    """
    chosen, rows = list[int](), 0
    by_left: list[list[int]] = [[] for _ in range(room + 1)]  # rows by what is left in them
    some = 0  # bit n is set where by_left[n] is not empty
    for size in sizes:
        fits = some >> size
        if fits:
            left = size + (fits & -fits).bit_length() - 1
            row = by_left[left].pop()
            some ^= 0 if by_left[left] else 1 << left
        else:
            left, row, rows = room, rows, rows + 1
        chosen.append(row)
        by_left[left - size].append(row)
        some |= 1 << (left - size)
    return chosen
