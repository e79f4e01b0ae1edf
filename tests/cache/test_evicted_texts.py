"""Texts whose blocks are evicted, which go on on the host: against a model of the memory, and a slow block manager."""

import random
from copy import deepcopy
from itertools import product

from redrafter.cache.block_manager import BlockCopy, BlockManager, BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE

Text = tuple[object, ...]


def text(*pieces: int) -> list[int]:
    """Return a full block of tokens for each number."""
    return [100 * piece + i for piece in pieces for i in range(BLOCK_SIZE)]


class Memory:
    """A manager, and what its blocks hold: the salt and the whole text that keys and values depend on."""

    def __init__(self, blocks: int, host_blocks: int):
        self.manager = BlockManager(blocks, host_blocks=host_blocks)
        self.device: dict[int, Text] = {}
        self.host: dict[int, Text] = {}
        self.copies: list[BlockCopy] = []

    def copy(self) -> None:
        for copy in self.manager.take_copies():
            source, target = (self.device, self.host) if copy.to_host else (self.host, self.device)
            target[copy.target] = source[copy.source]
            self.copies.append(copy)

    def admit(self, prompt: list[int], slots: int, salt: str | None = None) -> BlockTable:
        """Admit a row, check that it finds the beginning of its prompt, and compute the rest."""
        try:
            table = self.manager.admit(prompt, slots, salt=salt)
        finally:
            self.copy()
        for index in range(table.reused // BLOCK_SIZE):
            assert self.device[table.blocks[index]] == (salt, *prompt[: (index + 1) * BLOCK_SIZE])
        self.write(table, prompt)
        return table

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        for index in range(table.reused // BLOCK_SIZE, len(table.blocks)):
            self.device[table.blocks[index]] = (table.salt, *tokens[: (index + 1) * BLOCK_SIZE])

    def store(self, tokens: list[int], salt: str | None = None) -> int:
        """Read a prompt, publish it and give its blocks back; return how many of its tokens were found."""
        table = self.admit(tokens, len(tokens), salt)
        self.manager.publish(table, tokens)
        self.manager.release(table)
        return table.reused


def test_what_is_on_the_host_already_is_not_copied_again():
    memory = Memory(4, 10)
    for _ in range(3):
        memory.store(text(1, 2, 3))
        memory.store(text(4, 5, 6))
    to_host = [copy for copy in memory.copies if copy.to_host]
    assert len(to_host) == 6
    assert len(memory.copies) == 6 + 4 * 2  # the last block of a prompt is computed anew


def test_a_full_host_gives_up_the_end_of_the_text_that_was_needed_least_recently():
    memory = Memory(4, 5)
    for piece in (1, 3, 5, 7):
        memory.store(text(piece, piece + 1))
    assert memory.manager.num_host_blocks == 4
    found = [deepcopy(memory).store([*text(piece, piece + 1), 9]) for piece in (1, 3, 5, 7)]
    assert found == [16, 32, 32, 32]


def test_a_host_that_is_smaller_than_a_chain_keeps_what_is_being_copied_back():
    memory = Memory(6, 3)
    memory.store(text(1, 2))
    memory.store(text(3, 4, 5, 6, 7))  # the first text is on the host now
    assert memory.manager.num_host_blocks == 2
    assert memory.store([*text(1, 2), 9]) == 32


def test_of_what_was_copied_back_the_end_is_given_up_before_the_beginning():
    memory = Memory(4, 3)
    memory.store(text(1, 2))
    memory.store(text(3, 4, 5))
    assert memory.store([*text(1, 2), 9]) == 32
    memory.store(text(6, 7, 8))  # both leave the device again
    memory.store(text(10))  # and what leaves it now needs a place on the host
    assert memory.store([*text(1, 2), 9]) == 16


def test_a_text_goes_with_the_beginning_whose_place_it_would_need():
    memory = Memory(5, 2)
    first, second = memory.admit(text(1), 16), memory.admit(text(1, 2), 32)
    memory.manager.publish(first, text(1))
    memory.manager.publish(second, text(1, 2))
    memory.manager.release(first)
    held = memory.admit(text(3, 4), 32)  # the beginning is on the host now, and the end is on the device
    memory.manager.release(second)
    assert memory.manager.num_host_blocks == 1
    memory.manager.release(memory.admit(text(5, 6), 32))
    assert memory.manager.num_host_blocks == 0
    memory.manager.release(held)
    for piece in range(10, 20):
        memory.store(text(piece))
    assert memory.manager.num_host_blocks == 1


def test_a_text_that_is_computed_anew_is_found_on_the_device():
    memory = Memory(5, 10)
    memory.store(text(1, 2))
    memory.store(text(3, 4, 5, 6))
    table = memory.manager.admit(text(1, 2), 32, reuse=False)
    memory.copy()
    memory.write(table, text(1, 2))
    memory.manager.publish(table, text(1, 2))
    again = memory.admit([*text(1, 2), 9], 33)
    assert again.blocks[:2] == table.blocks
    assert memory.manager.onboarded == 0


def test_all_is_forgotten_on_demand_and_rows_go_on():
    memory = Memory(5, 10)
    memory.store(text(1, 2))
    held = memory.admit(text(3, 4), 2 * BLOCK_SIZE)
    memory.manager.publish(held, text(3, 4))
    memory.store(text(5, 6))
    memory.manager.forget()
    assert (memory.manager.num_host_blocks, memory.manager.num_free_blocks) == (0, 2)
    assert not memory.manager.roots
    memory.manager.publish(held, text(3, 4))
    memory.manager.release(held)
    assert memory.store([*text(3, 4), 9]) == 0, "keys that were forgotten are found"


def test_places_of_forgotten_texts_are_used_again():
    memory = Memory(4, 5)
    for _ in range(3):
        for piece in range(10):
            memory.store(text(piece))
        assert memory.manager.num_host_blocks == 4
        memory.manager.forget()


class Slow:
    """The same manager without a trie: whole texts as keys, a clock, and everything searched for.

    A salt is a first token that no other text has.
    """

    def __init__(self, blocks: int):
        self.all = set(range(1, blocks))
        self.held: list[list[int]] = []
        self.texts: dict[tuple[object, ...], int] = {}  # salt and whole text up to the end of a block -> that block
        self.used: dict[int, tuple[int, int]] = {}  # block -> when it was last released, and minus its depth
        self.clock = 0

    def unheld(self) -> set[int]:
        return self.all - {block for block_table in self.held for block in block_table}

    def reusable(self, prompt: list[int], salt: object) -> list[int]:
        blocks: list[int] = []
        for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
            if (salt, *prompt[:end]) not in self.texts:
                break
            blocks.append(self.texts[(salt, *prompt[:end])])
        return blocks

    def admit(self, prompt: list[int], slots: int, block_table: BlockTable | None, salt: object) -> None:
        """Check what the manager answered, None for an error, and follow it."""
        shared = self.reusable(prompt, salt)
        fresh = -(-slots // BLOCK_SIZE) - len(shared)
        usable = self.unheld() - set(shared)
        if block_table is None:
            assert fresh > len(usable)
            return
        assert block_table.reused == len(shared) * BLOCK_SIZE
        assert block_table.blocks[: len(shared)] == shared
        own = set(block_table.blocks[len(shared) :])
        assert len(own) == len(block_table.blocks) - len(shared) == fresh
        assert own <= usable
        order = sorted(usable, key=lambda block: self.used[block] if block in self.texts.values() else (-1, 0))
        empty = usable - set(self.texts.values())
        assert own <= empty if fresh <= len(empty) else own == set(order[:fresh])
        gone = [known for known, block in self.texts.items() if block in own]
        for known in list(self.texts):
            if any(known[: len(start)] == start for start in gone):
                del self.texts[known]
        self.held.append(block_table.blocks)

    def publish(self, blocks: list[int], tokens: list[int], salt: object) -> None:
        for index in range(len(tokens) // BLOCK_SIZE):
            self.texts.setdefault((salt, *tokens[: (index + 1) * BLOCK_SIZE]), blocks[index])

    def release(self, blocks: list[int], tokens: list[int], salt: object) -> None:
        self.held.remove(blocks)
        self.clock += 1
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        deepest = max((end for end in ends if self.texts.get((salt, *tokens[:end])) in blocks), default=0)
        for end in range(BLOCK_SIZE, deepest + 1, BLOCK_SIZE):
            self.used[self.texts[(salt, *tokens[:end])]] = (self.clock, -end)


def test_thousands_of_random_operations_find_what_was_published():
    for sizes in product((6, 14, 40), (0, 2, 3, 9, 2000), ([None], [None, "a"])):
        check_random_operations(*sizes)


def check_random_operations(blocks: int, host_blocks: int, salts: list[str | None]) -> None:
    """Fail if a row reads what another one has written, or, without a host, gets other blocks than a slow manager says.

    Args:
        blocks: Blocks of the device.
        host_blocks: Blocks of the host.
        salts: Salts of the sequences.
    """
    rng = random.Random(blocks * host_blocks + len(salts))
    memory, slow, published = Memory(blocks, host_blocks), None if host_blocks else Slow(blocks), set[Text]()
    manager, rows, found, refused = memory.manager, list[tuple[BlockTable, list[int], int]](), 0, 0

    def words(length: int) -> list[int]:  # few different blocks, so that texts often begin alike
        return text(*(rng.choice((1, 1, 1, 2, 3)) for _ in range(length // BLOCK_SIZE + 1)))[:length]

    def release(table: BlockTable, tokens: list[int]) -> None:
        if slow:
            slow.release(table.blocks, tokens, table.salt)
        manager.release(table)

    for _ in range(2000):
        action = rng.random()
        if action < 0.4:
            prompt, salt, table = words(rng.randint(1, 5 * BLOCK_SIZE)), rng.choice(salts), None
            slots = len(prompt) + rng.randint(0, 2 * BLOCK_SIZE)
            try:
                table = memory.admit(prompt, slots, salt)
            except CacheFullError:
                refused += 1
            if slow:
                slow.admit(prompt, slots, table, salt)
            if table:
                ends = range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
                known = max((end for end in ends if (salt, *prompt[:end]) in published), default=0)
                # With room for all, nothing is ever forgotten.
                assert table.reused == known if host_blocks == 2000 else table.reused <= known
                found += table.reused
                rows.append((table, prompt, slots))
        elif rows:
            table, tokens, slots = row = rng.choice(rows)
            if action < 0.55:
                tokens += words(3 * BLOCK_SIZE)[len(tokens) % BLOCK_SIZE :][: slots - len(tokens)]
                memory.write(table, tokens)
            elif action < 0.6 and not slow:
                try:
                    manager.grow(table, slots + BLOCK_SIZE)
                except CacheFullError:
                    continue
                memory.copy()
                rows[rows.index(row)] = (table, tokens, slots + BLOCK_SIZE)
                memory.write(table, tokens)
            else:
                manager.publish(table, tokens)
                published |= {(table.salt, *tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}
                if slow:
                    slow.publish(table.blocks, tokens, table.salt)
            if action > 0.8:
                release(table, tokens)
                rows.remove(row)
        assert manager.num_host_blocks <= max(host_blocks - 1, 0)
        assert slow is None or manager.num_free_blocks == len(slow.unheld())
        for table, tokens, _ in rows:
            for index in range(len(tokens) // BLOCK_SIZE):
                assert memory.device[table.blocks[index]] == (table.salt, *tokens[: (index + 1) * BLOCK_SIZE])
    assert found > 10 * BLOCK_SIZE
    assert refused > 50
    assert (manager.onboarded > 0) == (host_blocks > 0)
    for table, tokens, _ in rows:
        release(table, tokens)
    manager.forget()
    assert (manager.num_free_blocks, manager.num_host_blocks) == (blocks - 1, 0)
    assert sorted(manager.admit([0], (blocks - 1) * BLOCK_SIZE).blocks) == list(range(1, blocks))
    assert not manager.take_copies()
