"""The blocks of a paged cache: which rows hold them, and which store a prefix that another row may reuse.

Everything here is a number on the host: ids of blocks, never their keys and values. The keys and values of a token
depend on all tokens before it, so stored blocks form a trie: a node is a full block and is found only through the
blocks before it. Evicting a node removes its subtree, so that its descendants are never found under another prefix that
the block comes to hold. Each salt has its own trie, so that a row never reuses blocks that a row with another salt has
stored, nor can infer from its own speed that they exist.

A model with recurrent states can continue a stored prefix only where its states are stored too (`StoredStates`): at the
end of a row's prompt, and where a prompt diverges from stored blocks, since later prompts are likely to share the same
beginning.

If there are blocks on the host too, the contents of an evicted block move there: its node stays in the trie, and is
dropped only when its host block is needed for a later one. A row that finds it gets a device block for it. The owner of
the keys and values makes the resulting copies, in their order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from redrafter.cache.stored_states import StoredStates
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE

# Tokens that a prefix with states must save to be stored: storing some makes mixers read a prompt in two parts. On a
# CPU that took a 25th of the time of LFM2's prompts of 200 tokens, and as long as the prompt itself for 60 tokens of a
# tiny Mamba-2, whose scan is padded to a chunk.
MIN_SAVED = 64


@dataclass
class BlockTable:
    """The blocks of one row.

    Attributes:
        manager: The manager of the blocks.
        blocks: Ids of the blocks in order of position; slot s of the row is in block `blocks[s // BLOCK_SIZE]`.
        reused: Leading tokens whose keys and values were stored already; a multiple of `BLOCK_SIZE`, less than the
            prompt's length.
        salt: Only rows with the same salt share blocks.
        state_row: Row of the row's recurrent states in their store; 0 for a model without.
        copied: Number of leading blocks whose ids the running batch has copied.
        restored: Row of the stored recurrent states after the reused tokens; 0 for none.
        snapshots: Rows for copies of the row's recurrent states, by the number of tokens after which each is taken;
            published ones are removed.
        stored: Prefixes whose states the row has published.
        forgotten: How often all prefixes had been forgotten when the row was admitted.
    """

    manager: BlockManager
    blocks: list[int]
    reused: int
    salt: Hashable = None
    state_row: int = 0
    copied: int = 0
    restored: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)
    stored: list[Hashable] = field(default_factory=list)
    forgotten: int = 0


class BlockCopy(NamedTuple):
    """A copy of the keys and values of one block.

    Attributes:
        to_host: Whether it copies from the device to the host, or the other way.
        source: Id of the block that is read.
        target: Id of the block that is written, on the other side.
    """

    to_host: bool
    source: int
    target: int


class _Node:
    """A stored block: its `BLOCK_SIZE` tokens follow its parent's.

    Attributes:
        block: Id of the device block; 0 for a prefix that is on the host only.
        host_block: Id of the host block that holds a copy; 0 without one.
        parent: The block before it; None for a root, and for a block that was removed from the trie.
        tokens: Its tokens.
        children: The blocks that follow it.
    """

    def __init__(self, block: int, parent: _Node | None, tokens: tuple[int, ...]):
        self.block, self.parent, self.tokens = block, parent, tokens
        self.host_block = 0
        # Keyed by the tokens themselves, so that no hash collision can match another prefix.
        self.children: dict[tuple[int, ...], _Node] = {}


class _Root(_Node):
    def __init__(self, salt: Hashable):  # has no block; the trie of all prefixes stored under the salt
        super().__init__(0, None, ())
        self.salt = salt


class BlockManager:
    """Allocates blocks 1 to blocks - 1 to rows and finds stored prefixes that a row can reuse.

    Block 0 is never allocated: idle rows and padding write there. A row writes only to blocks that it does not share.
    It shares full blocks strictly before the first token that it computes, and publishes full blocks of committed
    tokens, which it does not write to again. Every call takes time in proportion to the row's blocks; so does eviction,
    spread over the blocks once published.

    Attributes:
        freed: Number of times that blocks were released or published. An allocation that failed fails again until this
            changes.
        onboarded: Number of blocks so far that rows have found on the host only.
        roots: By salt, the trie of the prefixes stored under it; a salt without a stored block has none.
        states: The recurrent states of stored prefixes; None for a model without.
    """

    def __init__(self, blocks: int, rows: int | None = None, host_blocks: int = 0, prefix_states: int = 0):
        """Begin with all blocks free.

        Args:
            blocks: Blocks of the pool, block 0 included.
            rows: Number of rows that may have recurrent states at once, which are not in blocks; None for a model
                without.
            host_blocks: Blocks on the host, block 0 included, which is never used there either; 0 for no memory. With
                any, `take_copies` follows each `admit` and `grow`, before their blocks are read or written.
            prefix_states: Number of prefixes that may have recurrent states, in entries after the `rows` rows.
        """
        assert blocks > 0, "block 0 is always there"
        self._blocks = blocks
        self._state_rows = None if rows is None else deque(range(1, 1 + rows))  # that no row has
        self.states = None if rows is None else StoredStates(range(1 + rows, 1 + rows + prefix_states))
        self._rows = [0] * blocks  # rows that hold each block
        self._empty = deque(range(1, blocks))  # blocks that no row holds and that store no prefix
        # Blocks that no row holds but that store a prefix, in order of eviction, least recently used first. The blocks
        # before such a block in its prefix are held by a row or come later in this order.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.freed = self._forgotten = 0
        self.roots: dict[Hashable, _Root] = {}
        self._nodes: dict[int, _Node] = {}  # of each block that stores a prefix
        self._host_empty = deque(range(1, host_blocks))
        # of each used host block, least recently needed first
        self._host_nodes: OrderedDict[int, _Node] = OrderedDict()
        self._copies: list[BlockCopy] = []  # pending copies
        self.onboarded = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that rows may hold."""
        return self._blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks held by no row, whether or not they still store a prefix."""
        return len(self._empty) + len(self._idle)

    @property
    def num_host_blocks(self) -> int:
        """Number of host blocks that store a prefix."""
        return len(self._host_nodes)

    def admit(
        self, prompt: Sequence[int], slots: int, reuse: bool = True, salt: Hashable = None, publishes: bool = True
    ) -> BlockTable:
        """Allocate the blocks of a new row.

        The longest stored chain of full blocks of `prompt[:-1]` is shared; for a model with recurrent states, the
        longest whose states are stored; blocks on the host only get device blocks. At least the last token is
        recomputed, for its logits.

        Args:
            prompt: Tokens of the row.
            slots: The most slots that the row will use: prompt, new tokens and scratch.
            reuse: Whether to share stored blocks; without, the whole prompt is computed.
            salt: Only blocks stored by rows with the same salt are shared.
            publishes: Whether the row's tokens will be published; otherwise none of its recurrent states are copied.

        Raises:
            CacheFullError: Too few blocks are free, or the maximum number of rows is admitted; nothing has changed
                then.
        """
        assert 0 < len(prompt) <= slots
        # Without the last token, which must be computed for its logits.
        chain = self._find(prompt[:-1], salt) if reuse else []
        known = len(chain)
        if self.states is not None:
            chain = chain[: self.states.longest(chain)]
        shared = [node.block for node in chain if node.block]
        fresh = -(-slots // BLOCK_SIZE) - len(shared)
        # A shared block cannot be evicted to make room for the rest.
        free = self.num_free_blocks - sum(block in self._idle for block in shared)
        if fresh > free:
            raise CacheFullError(
                f"the KV cache is full: {slots} tokens need {fresh} blocks of {BLOCK_SIZE} "
                f"besides {len(shared)} reused, and {free} of {self._blocks - 1} are free; "
                "raise kv_cache_free_gpu_memory_fraction, or lower max_new_tokens or the batch"
            )
        if self._state_rows is not None and not self._state_rows:
            raise CacheFullError(
                "the recurrent states of all rows that there is memory for are taken; raise "
                "kv_cache_free_gpu_memory_fraction, or lower the batch"
            )
        # All checks are done: from here on nothing may fail, as a half-admitted row would leak blocks.
        for block in shared:
            self._idle.pop(block, None)
        blocks = self._place(chain, fresh)
        for block in blocks:
            self._rows[block] += 1
        state_row = self._state_rows.popleft() if self._state_rows is not None else 0
        table = BlockTable(self, blocks, len(chain) * BLOCK_SIZE, salt, state_row, forgotten=self._forgotten)
        if self.states is not None and reuse:
            table.restored = self.states.use(chain[-1]) if chain else 0
            # States are worth storing at two positions: where the prompt diverges from stored blocks, as other prompts
            # with the same beginning will, and its last full block, which the next turn of a chat continues.
            for count in dict.fromkeys((known, (len(prompt) - 1) // BLOCK_SIZE)) if publishes else ():
                saves = (count - len(chain)) * BLOCK_SIZE >= MIN_SAVED
                if saves and (row := self.states.reserve()):
                    table.snapshots[count * BLOCK_SIZE] = row
        return table

    def _place(self, chain: Sequence[_Node], fresh: int) -> list[int]:
        """Return the blocks of a chain, which must not be idle, and `fresh` more.

        The fresh ones serve the chain's blocks on the host only, and the rest of the row.
        """
        on_host = [node for node in chain if not node.block]
        for node in on_host:  # evictions below must not reuse these host blocks before they are copied back
            del self._host_nodes[node.host_block]
        taken = deque(self._take_free_block() for _ in range(fresh))
        for node in on_host:
            node.block = taken.popleft()
            self._nodes[node.block] = node
            self._copies.append(BlockCopy(False, node.host_block, node.block))
        for node in reversed(on_host):  # the end of a prefix is evicted before its beginning
            self._host_nodes[node.host_block] = node
        self.onboarded += len(on_host)
        return [*(node.block for node in chain), *taken]

    def grow(self, block_table: BlockTable, slots: int) -> None:
        """Add blocks to a row until it may touch `slots` slots.

        Raises:
            CacheFullError: Too few blocks are free; nothing has changed then.
        """
        fresh = -(-slots // BLOCK_SIZE) - len(block_table.blocks)
        if fresh > self.num_free_blocks:
            raise CacheFullError(
                f"the KV cache is full: {fresh} more blocks of {BLOCK_SIZE} are needed, {self.num_free_blocks} are free"
            )
        for _ in range(fresh):
            block = self._take_free_block()
            self._rows[block] += 1
            block_table.blocks.append(block)

    def publish(self, block_table: BlockTable, tokens: Sequence[int]) -> None:
        """Let later rows reuse the full blocks of a row's tokens.

        Of blocks with equal tokens and salt, only the first one published is found, as long as it is on the device.

        The keys and values of the row's first `tokens` must be valid in its blocks, and so must its snapshots of the
        states after them. A row that was admitted before `forget` publishes nothing.
        """
        self.freed += 1
        if block_table.forgotten != self._forgotten:
            return
        full = len(tokens) // BLOCK_SIZE
        assert full <= len(block_table.blocks), "more tokens than the row has slots"
        if not full:
            return
        node: _Node = self.roots.setdefault(block_table.salt, _Root(block_table.salt))
        for index, block in enumerate(block_table.blocks[:full]):
            block_tokens = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            child = node.children.get(block_tokens)
            if child is None or not child.block:
                assert block not in self._nodes, "the row's tokens have changed since they were published"
                if child is None:
                    child = node.children[block_tokens] = _Node(block, node, block_tokens)
                # A node that was on the host only is on the device again, since this row computed the same block.
                child.block, self._nodes[block] = block, child
            node = child
            if row := block_table.snapshots.pop((index + 1) * BLOCK_SIZE, 0):
                assert self.states is not None, "only rows of a model with states have snapshots"
                self.states.keep(node, row)
                block_table.stored.append(node)

    def withdraw(self, block_table: BlockTable) -> None:
        """Let no later row find the blocks that a row has published, nor the blocks after them; the row keeps them."""
        # Reused blocks were published by other rows, and stay valid.
        for block in block_table.blocks[block_table.reused // BLOCK_SIZE :]:
            if node := self._nodes.get(block):
                self._forget(node)
        for prefix in block_table.stored:  # possibly of blocks that another row has published
            assert self.states is not None, "only rows of a model with states have stored some"
            self.states.forget(prefix)

    def release(self, block_table: BlockTable) -> None:
        """Take a row's blocks back and empty its block table. Call it once.

        Published blocks can be found until they are needed for another row. They are evicted least recently released
        first, and the end of a prefix before its beginning.
        """
        assert block_table.blocks, "released twice"
        self.freed += 1
        blocks, block_table.blocks = block_table.blocks, []
        if self._state_rows is not None:
            self._state_rows.append(block_table.state_row)
        if self.states is not None:
            for row in block_table.snapshots.values():
                self.states.give_back(row)
        last: _Node | None = None
        for block in blocks:
            last = self._nodes.get(block, last)
            self._rows[block] -= 1
            if not self._rows[block]:
                if block in self._nodes:
                    self._idle[block] = None
                else:
                    self._empty.append(block)
        # Follow the parents and not the row's blocks in reverse: where another row published the same beginning first,
        # that row's block must outlast this row's end.
        while last is not None and last.parent is not None:
            if last.block in self._idle:
                self._idle.move_to_end(last.block)
            last = last.parent

    def take_copies(self) -> list[BlockCopy]:
        """Return the pending copies since the last call, in the order in which they must be made."""
        copies, self._copies = self._copies, []
        return copies

    def forget(self) -> None:
        """Remove all stored prefixes and pending copies; rows keep their blocks, and publish them no more."""
        self._forgotten += 1
        for root in list(self.roots.values()):
            for node in list(root.children.values()):
                self._forget(node)
        self._copies.clear()

    def _find(self, tokens: Sequence[int], salt: Hashable) -> list[_Node]:
        """Return the longest chain of full blocks, stored under `salt`, that `tokens` begin with."""
        chain: list[_Node] = []
        node: _Node | None = self.roots.get(salt)
        for start in range(0, len(tokens), BLOCK_SIZE):  # the tokens of a last block that is not full match no child
            node = node and node.children.get(tuple(tokens[start : start + BLOCK_SIZE]))
            if node is None:
                break
            chain.append(node)
        return chain

    def _take_free_block(self) -> int:
        """Return a block that no row holds: an empty one, or else the least recently used idle one."""
        if self._empty:
            return self._empty.popleft()
        block, _ = self._idle.popitem(last=False)
        node = self._nodes.pop(block)
        node.block = 0
        if not node.host_block:
            self._offload(node, block)
        # Without a copy on the host the prefix is lost, and so are its continuations, which are found through it only.
        # The node may be removed already: `_offload` evicts host blocks, and their continuations with them.
        if not node.host_block and node.parent is not None:
            self._forget(node)
        return block

    def _offload(self, node: _Node, block: int) -> None:
        """Assign a host block to a stored prefix, if possible: an empty one, or the least recently needed."""
        if not self._host_empty and self._host_nodes:
            host_block, oldest = self._host_nodes.popitem(last=False)
            self._host_empty.append(host_block)
            oldest.host_block = 0
            if not oldest.block:
                self._forget(oldest)
        if self._host_empty and node.parent is not None:  # its ancestor may have just been removed
            node.host_block = self._host_empty.popleft()
            self._host_nodes[node.host_block] = node
            self._copies.append(BlockCopy(True, block, node.host_block))

    def _forget(self, node: _Node) -> None:
        """Remove a stored prefix and all its continuations from the trie."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if isinstance(parent, _Root) and not parent.children:
            del self.roots[parent.salt]
        subtree = [node]
        # A loop, not recursion: a long prefix has thousands of nested nodes.
        while subtree:
            node = subtree.pop()
            node.parent = None
            subtree.extend(node.children.values())
            if self.states is not None:
                self.states.forget(node)
            if node.block:
                del self._nodes[node.block]
                if node.block in self._idle:
                    del self._idle[node.block]
                    self._empty.append(node.block)
            if node.host_block:
                del self._host_nodes[node.host_block]
                self._host_empty.append(node.host_block)
