"""Which stored prefixes have the recurrent states at their ends, and in which rows of a store these are.

A text that begins with a stored prefix can only continue from a place where all layers' states were copied. So states
are kept at few ends of blocks, within a bound: each takes as much memory as the states of a row. The least recently
used are given up first. Everything here is a number on the host.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence


class StoredStates:
    """Rows of a store of recurrent states: free, reserved for a sequence, or kept for a stored prefix.

    A prefix is named by its last block, as the block manager has it.
    """

    def __init__(self, rows: Iterable[int]):
        """Begin with all rows free."""
        self._free = deque(rows)
        self._rows: OrderedDict[Hashable, int] = OrderedDict()  # by prefix, the least recently used first

    def __len__(self) -> int:
        return len(self._rows)

    def longest(self, chain: Sequence[Hashable]) -> int:
        """Return the length in blocks of the longest beginning of a chain whose states are kept; 0 for none."""
        return next((count for count in range(len(chain), 0, -1) if chain[count - 1] in self._rows), 0)

    def use(self, prefix: Hashable) -> int:
        """Return the row of the states at the end of a prefix, which were used just now."""
        self._rows.move_to_end(prefix)
        return self._rows[prefix]

    def reserve(self, spare: int = 0) -> int:
        """Return a row for a sequence to copy states to; 0 where others have reserved all but `spare` of them."""
        if len(self._free) + len(self._rows) <= spare:
            return 0
        if not self._free:
            self._free.append(self._rows.popitem(last=False)[1])
        return self._free.popleft()

    def keep(self, prefix: Hashable, row: int) -> None:
        """Keep the states of a reserved row for a prefix, unless it has some already."""
        if prefix in self._rows:
            self.give_back(row)
        else:
            self._rows[prefix] = row

    def give_back(self, row: int) -> None:
        """Let others reserve a row that was reserved."""
        self._free.append(row)

    def forget(self, prefix: Hashable) -> None:
        """Give up the states of a prefix, if it has some: nothing can be found there any more."""
        if prefix in self._rows:
            self.give_back(self._rows.pop(prefix))
