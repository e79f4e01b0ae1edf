"""Which row holds which blocks of a paged cache, and which blocks still hold a text that another row may reuse.

Host numbers only: ids of blocks, never their keys and values. Those depend on the whole text before them, so stored
blocks form a trie: a node is a full block, found only by way of the blocks before it. Evicting a node cuts its subtree
off, so that what hung below can never be found under another text that its block comes to hold. There is one trie for
each salt, so that a row never finds what a row with another salt has stored, nor sees by its speed that it is there.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE

__all__ = ["BlockManager", "BlockTable"]


@dataclass
class BlockTable:
    """What one row holds.

    blocks: ids, in order of position; slot s of the row lives in block `blocks[s // BLOCK_SIZE]`.
    reused: leading tokens whose keys and values are already there, a multiple of `BLOCK_SIZE` below the prompt's.
    salt: only rows with the same salt share blocks.
    """

    blocks: list[int]
    reused: int
    salt: str | None = None


class _Node:
    """A stored block: `tokens`, `BLOCK_SIZE` of them, after the text of `parent`. A root has no parent and no block."""

    def __init__(self, block: int, parent: "_Node | None", tokens: tuple[int, ...]):
        self.block, self.parent, self.tokens = block, parent, tokens
        self.children: dict[tuple[int, ...], _Node] = {}  # by the tokens themselves: equality is exact, no hash decides


class _Root(_Node):
    """The root of one salt's trie. Every text that was stored under this salt hangs below it."""

    def __init__(self, salt: str | None):
        super().__init__(0, None, ())
        self.salt = salt


class BlockManager:
    """Blocks 1..blocks-1, leased to rows. Block 0 is never leased: idle rows and padding write there.

    A row writes only to its own blocks. It shares full blocks strictly before the first token that it computes, and it
    publishes full blocks of committed tokens, which it does not write to again.
    Every call takes time in proportion to the row's blocks; so does eviction, spread over the blocks once published.
    """

    def __init__(self, blocks: int):
        assert blocks > 0, "block 0 is always there"
        self._blocks = blocks
        self._rows = [0] * blocks  # rows that hold each block
        self._empty = deque(range(1, blocks))  # held by no row, findable by no text
        # Held by no row but findable, in order of eviction: least recently used first. Whatever stands here, the blocks
        # before it in its text are held by a row or stand further back.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._roots: dict[str | None, _Root] = {}  # by salt; a salt without a stored block has none
        self._nodes: dict[int, _Node] = {}  # of each findable block

    @property
    def num_blocks(self) -> int:
        """Blocks that rows may hold."""
        return self._blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `admit` could hand out now: those held by no row, whether or not a text is still stored there."""
        return len(self._empty) + len(self._idle)

    def admit(self, prompt: Sequence[int], slots: int, reuse: bool = True, salt: str | None = None) -> BlockTable:
        """Blocks for a row that will never touch more than `slots` slots: prompt, new tokens and scratch.

        The longest stored chain of full blocks of `prompt[:-1]` is shared: at least the last token is computed anew,
        for its logits; without `reuse`, all is. Only what rows with the same `salt` have stored is shared. Raises
        `CacheFullError`, with nothing changed, when too few blocks are free.
        """
        assert 0 < len(prompt) <= slots
        shared = [node.block for node in self._find(prompt[:-1], salt)] if reuse else []
        fresh = -(-slots // BLOCK_SIZE) - len(shared)
        free = self.num_free_blocks - sum(
            block in self._idle for block in shared
        )  # what is shared cannot be evicted for the rest
        if fresh > free:
            raise CacheFullError(
                f"the KV cache is full: {slots} tokens need {fresh} blocks of {BLOCK_SIZE} "
                f"besides {len(shared)} reused, and {free} of {self._blocks - 1} are free; "
                "raise kv_cache_free_gpu_memory_fraction, or lower max_new_tokens or the batch"
            )
        for block in shared:
            self._idle.pop(block, None)
        blocks = shared + [self._empty.popleft() if self._empty else self._evict() for _ in range(fresh)]
        for block in blocks:
            self._rows[block] += 1
        return BlockTable(blocks, len(shared) * BLOCK_SIZE, salt)

    def grow(self, block_table: BlockTable, slots: int) -> None:
        """Let a row touch `slots` slots. Raises `CacheFullError`, with nothing changed, when too few are free."""
        fresh = -(-slots // BLOCK_SIZE) - len(block_table.blocks)
        if fresh > self.num_free_blocks:
            raise CacheFullError(
                f"the KV cache is full: {fresh} more blocks of {BLOCK_SIZE} are needed, {self.num_free_blocks} are free"
            )
        for _ in range(fresh):
            block = self._empty.popleft() if self._empty else self._evict()
            self._rows[block] += 1
            block_table.blocks.append(block)

    def publish(self, block_table: BlockTable, tokens: Sequence[int]) -> None:
        """Let later rows reuse the full blocks of `tokens`: the row's committed tokens from its first on, whose keys
        and values are valid in its blocks. Of blocks with an equal text and salt, the one published first stays the one
        found.
        """
        full = len(tokens) // BLOCK_SIZE
        assert full <= len(block_table.blocks), "more tokens than the row has slots"
        if not full:
            return
        node: _Node = self._roots.setdefault(block_table.salt, _Root(block_table.salt))
        for index, block in enumerate(block_table.blocks[:full]):
            piece = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            if piece not in node.children:
                assert block not in self._nodes, "the row's text has changed since it was published"
                node.children[piece] = self._nodes[block] = _Node(block, node, piece)
            node = node.children[piece]

    def release(self, block_table: BlockTable) -> None:
        """Take the row's blocks back, once; its block_table is empty then.

        Published ones stay findable until they are needed for something else. They are evicted least recently released
        first, and of one text the end before the beginning.
        """
        assert block_table.blocks, "released twice"
        blocks, block_table.blocks = block_table.blocks, []
        last: _Node | None = None
        for block in blocks:
            last = self._nodes.get(block, last)
            self._rows[block] -= 1
            if not self._rows[block]:
                if block in self._nodes:
                    self._idle[block] = None
                else:
                    self._empty.append(block)
        # By way of parents, not of the row's blocks in reverse: where another row published the same beginning first,
        # it is that row's block that must outlast this row's end.
        while last is not None and last.parent is not None:
            if last.block in self._idle:
                self._idle.move_to_end(last.block)
            last = last.parent

    def _find(self, tokens: Sequence[int], salt: str | None) -> list[_Node]:
        """The longest chain of full blocks, stored under `salt`, that `tokens` begin with."""
        found: list[_Node] = []
        node: _Node | None = self._roots.get(salt)
        if node is None:
            return found
        for start in range(0, len(tokens), BLOCK_SIZE):  # a short last piece is nobody's child
            child = node.children.get(tuple(tokens[start : start + BLOCK_SIZE]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _evict(self) -> int:
        """Forget the least recently used block's text, and every text that goes on from there. Returns the block."""
        block, _ = self._idle.popitem(last=False)
        node = self._nodes[block]
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if isinstance(parent, _Root) and not parent.children:
            del self._roots[parent.salt]
        cut = [node]
        while cut:
            node = cut.pop()
            del self._nodes[node.block]
            cut.extend(node.children.values())
            # Below it, only blocks that rows hold: an idle one would have stood before it and been evicted earlier.
            assert node.block not in self._idle
        return block
