"""Windows of documents, and batches of windows.

Documents are cut into windows of at most `length` tokens. Where most are shorter, a batch of one window a row would be
mostly padding, so several windows share a row of exactly `length` tokens. `Batch.segment` numbers them, for the
base must not attend from one window to another; the loss mask is 0 at the first token of each window, so that no
rollout crosses from one into the next.
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

POOL_BATCHES = 32  # batches among which rows are sorted by width, so that a batch holds little padding
SEED_STRIDE = 1_000_003  # between the generators of two seeds; more than the epochs of any training


@dataclass(frozen=True)
class Document:
    """Token ids with a loss mask."""

    ids: list[int]
    mask: list[bool]  # of each token, whether the base itself is to write it
    where: str = field(default="", compare=False)  # file and line of the row that the document was made from

    @property
    def learnable(self) -> bool:
        """Return whether a rollout fits into the document: two masked tokens in a row, after a first token."""
        return bytes(self.mask).find(b"\1\1", 1) >= 0


class Batch(NamedTuple):
    """Rows of windows."""

    tokens: Tensor  # token ids, `[B, T]` int64
    mask: Tensor  # tokens that the base itself is to write, `[B, T]` bool
    # Number of each token's window within its row, `[B, T]` int64; padding at the end of a row has the number after the
    # last.
    segment: Tensor


class Windows:
    """Documents cut into windows of at most `length` tokens. A window never holds tokens of two documents.

    Args:
        documents: Documents to cut. Windows that teach nothing are left out.
        length: Most tokens of a window, and of a row of windows.
        bos: Id that begins a text. Where a document opens with it, so does each of its windows, as prompts do.
        pack: Whether a row holds as many windows as fit into `length` tokens; else one window, right-padded to the
            longest of the batch.
    """

    def __init__(self, documents: Iterable[Document], length: int, bos: int | None = None, pack: bool = True):
        tokens, masks, offsets = array("i"), bytearray(), array("q", [0])
        self.origins: list[str] = []  # file and line of each window's document
        # Tokens to learn that no window holds, and length of the longest such document.
        self.missed = self.longest_cut = 0
        for document in documents:
            # Each window of a split document begins with BOS, as every text does in generation.
            opening = [bos] if bos is not None and document.ids[:1] == [bos] else []
            room = length - len(opening)
            for first in range(len(opening), len(document.ids), room):
                ids = opening + document.ids[first : first + room]
                mask = [False] * len(opening) + document.mask[first : first + room]
                if Document(ids, mask).learnable:
                    tokens.extend(ids)
                    masks.extend([False, *mask[1:]])  # no token before the first one could predict it
                    offsets.append(len(tokens))
                    self.origins.append(document.where)
                elif any(mask):
                    self.missed += sum(mask)
                    self.longest_cut = max(self.longest_cut, len(document.ids))
        # [M], token ids of all windows, one after another; [M], which of them are to be learnt
        self.tokens = torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.empty(0, dtype=torch.int32)
        self.mask = torch.frombuffer(masks, dtype=torch.bool) if masks else torch.empty(0, dtype=torch.bool)
        self.offsets = torch.frombuffer(offsets, dtype=torch.int64)  # [windows + 1], where each begins, and all end
        self.lengths = self.offsets.diff()  # [windows]
        # How windows share rows depends on their lengths alone, so it is the same in each epoch. An epoch shuffles
        # which of the windows of one length takes which place, and the order of the rows.
        sizes = self.lengths.sort(descending=True).values
        row = torch.tensor(assign_rows(sizes.tolist(), length), dtype=torch.int64) if pack else torch.arange(len(self))
        self._slots = row.argsort(stable=True)  # [windows], indices into windows sorted by length, row after row
        self._row_starts = pad(row.bincount().cumsum(0), (1, 0))  # [rows + 1], of each row's part of _slots
        self.row_widths = torch.full_like(self._row_starts[1:], length) if pack else sizes  # [rows], with padding

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, vocab_size: int, context: int | None) -> None:
        """Check that a base which knows `vocab_size` ids and reads `context` tokens can read all windows.

        Raises:
            MismatchError: If a token id is not below `vocab_size`. The message names its row of the data.
            ArgumentError: If rows of a batch are longer than `context`.
        """
        largest = int(self.tokens.argmax())
        if int(self.tokens[largest]) >= vocab_size:
            where = self.origins[int(torch.searchsorted(self.offsets, largest, right=True)) - 1]
            raise MismatchError(
                f"{where}: token id {int(self.tokens[largest])}, but the base knows {vocab_size} ids; use its tokenizer"
            )
        if context is not None and (widest := int(self.row_widths.max())) > context:
            too_wide = f"rows of {widest} tokens are more than the base's context of {context}"
            raise ArgumentError(f"{too_wide}; make --length {context} or less")

    def count_ids(self, vocab_size: int) -> Tensor:
        """Count how often each id is to be learnt, `[V]` int64."""
        return self.tokens[self.mask].long().bincount(minlength=vocab_size)

    def steps_per_epoch(self, size: int, processes: int = 1) -> int:
        """Return the batches of `size` rows that each process sees in an epoch, so that every window is seen."""
        return -(-len(self.row_widths) // (size * processes))

    def batches(
        self, size: int, seed: int, process: int = 0, processes: int = 1, start: int = 0, multiple: int | None = None
    ) -> Iterator[Batch]:
        """Yield endless batches for one process. There must be at least one window.

        Args:
            size: Rows of a batch.
            seed: Seed of the shuffles.
            process: Rank of this process.
            processes: Processes that take turns with the batches of each epoch.
            start: Batches of this process to skip, at the cost of at most an epoch's shuffle.
            multiple: Number that the batches of an epoch are a multiple of; `processes` when None. With the same
                number, all counts of processes share the same batches.
        """
        multiple = multiple or processes
        batches_per_epoch = self.steps_per_epoch(size, multiple) * multiple
        epoch, first = divmod(start * processes + process, batches_per_epoch)
        for number in count(epoch):
            windows, batches = self._epoch(number, size, seed, multiple)
            for rows in batches[first::processes]:
                spans = zip(self._row_starts[rows].tolist(), self._row_starts[rows + 1].tolist(), strict=True)
                width = int(self.row_widths[rows].max())
                built = [self._build_row(windows[begin:end], width) for begin, end in spans]
                yield Batch(*(torch.stack(parts) for parts in zip(*built, strict=True)))
            first = (first - batches_per_epoch) % processes  # this process's first batch of the next epoch

    def _epoch(self, epoch: int, size: int, seed: int, multiple: int) -> tuple[Tensor, list[Tensor]]:
        """Return the windows of all rows, row after row, and the rows of each batch, processes taking turns."""
        random = torch.Generator().manual_seed((seed * SEED_STRIDE + epoch) % 2**63)
        windows = torch.randperm(len(self), generator=random)
        # Sorted by length again, so that each slot gets a window of the length it was packed for.
        windows = windows[self.lengths[windows].argsort(descending=True, stable=True)][self._slots]
        order = torch.randperm(len(self.row_widths), generator=random)
        total = self.steps_per_epoch(size, multiple) * size * multiple
        order = order.repeat(-(-total // len(order)))[:total]  # wraps around, to fill the last batches
        # Rows of similar width share a batch, which saves padding; sorted within a pool alone, so that epochs stay
        # shuffled.
        pools = (pool[self.row_widths[pool].argsort(stable=True)] for pool in order.split(POOL_BATCHES * size))
        batches = [batch for pool in pools for batch in pool.split(size)]
        return windows, [batches[index] for index in torch.randperm(len(batches), generator=random).tolist()]

    def _build_row(self, windows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:  # [width] each
        spans = list(zip(self.offsets[windows].tolist(), self.offsets[windows + 1].tolist(), strict=True))
        tokens, mask = (torch.cat([flat[first:last] for first, last in spans]) for flat in (self.tokens, self.mask))
        segment = torch.arange(len(windows)).repeat_interleave(self.lengths[windows])
        padding = (0, width - len(tokens))
        return pad(tokens.long(), padding), pad(mask, padding), pad(segment, padding, value=len(windows))


def assign_rows(sizes: list[int], room: int) -> list[int]:
    """Assign each size to a row by best fit: to the row where it leaves the least room, else to a new row.

    Rows are numbered from 0 in the order in which they are opened. Falling order of sizes wastes least.
    """
    assigned, rows = list[int](), 0
    rows_by_room_left: list[list[int]] = [[] for _ in range(room + 1)]
    occupied = 0  # bit n is set where rows_by_room_left[n] is not empty
    for size in sizes:
        # Best fit: the lowest set bit is the row with the least room that suffices, found in constant time.
        fits = occupied >> size
        if fits:
            left = size + (fits & -fits).bit_length() - 1
            row = rows_by_room_left[left].pop()
            occupied ^= 0 if rows_by_room_left[left] else 1 << left
        else:
            left, row, rows = room, rows, rows + 1
        assigned.append(row)
        rows_by_room_left[left - size].append(row)
        occupied |= 1 << (left - size)
    return assigned
