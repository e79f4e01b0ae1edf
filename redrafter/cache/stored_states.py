"""Which stored prefixes have recurrent states, and in which rows of a store.

A row can continue a stored prefix only at a position where all layers' states were copied. So states are stored at the
ends of a few blocks, up to a limit: each takes as much memory as the states of a row. The least recently used are
dropped first. Everything here is a number on the host.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence


class StoredStates:
    """Rows of a store of recurrent states: free, reserved for a sequence, or holding a stored prefix's states.

    A prefix is identified by its last block in the block manager.
    """

    def __init__(self, rows: Iterable[int]):
        """Make a store with all rows free."""
        self._free = deque(rows)
        self._rows: OrderedDict[Hashable, int] = OrderedDict()  # by prefix, the least recently used first

    def __len__(self) -> int:
        return len(self._rows)

    def longest(self, chain: Sequence[Hashable]) -> int:
        """Return the length in blocks of the longest prefix of a chain with stored states; 0 for none."""
        return next((count for count in range(len(chain), 0, -1) if chain[count - 1] in self._rows), 0)

    def use(self, prefix: Hashable) -> int:
        """Return the row of a prefix's states, and mark them as the most recently used."""
        self._rows.move_to_end(prefix)
        return self._rows[prefix]

    def reserve(self) -> int:
        """Return a row for a copy of a sequence's states; 0 if others have reserved all of them."""
        if not self._free and not self._rows:
            return 0
        # The least recently used prefix loses its states; its keys and values stay stored.
        if not self._free:
            self._free.append(self._rows.popitem(last=False)[1])
        return self._free.popleft()

    def keep(self, prefix: Hashable, row: int) -> None:
        """Store the states of a reserved row for a prefix, unless it already has some."""
        if prefix in self._rows:
            self.give_back(row)
        else:
            self._rows[prefix] = row

    def give_back(self, row: int) -> None:
        """Release a reserved row."""
        self._free.append(row)

    def forget(self, prefix: Hashable) -> None:
        """Drop the states of a prefix, if it has some, as it can no longer be found."""
        if prefix in self._rows:
            self.give_back(self._rows.pop(prefix))
