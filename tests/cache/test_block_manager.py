"""The block manager, against a slow one without a trie and against a model of the memory."""

import random
from copy import deepcopy

import pytest

from redrafter.cache.block_manager import BlockManager, BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE


def text(*pieces: int) -> list[int]:
    """Return a full block of tokens for each number."""
    return [100 * piece + i for piece in pieces for i in range(BLOCK_SIZE)]


def store(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Admit a row, publish its text and release it; return its blocks."""
    block_table = manager.admit(tokens, len(tokens))
    manager.publish(block_table, tokens)
    blocks = block_table.blocks
    manager.release(block_table)
    return blocks


def stored(manager: BlockManager, tokens: list[int]) -> int:
    """Return how many of the tokens a row would reuse; a copy of the manager is asked, so that nothing is evicted."""
    return deepcopy(manager).admit([*tokens, 0], len(tokens) + 1).reused


def test_a_row_gets_blocks_for_all_its_slots_and_never_block_zero():
    manager = BlockManager(8)
    assert manager.num_free_blocks == 7
    block_tables = [manager.admit([5], slots) for slots in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE)]
    assert [len(block_table.blocks) for block_table in block_tables] == [1, 1, 2, 3]
    assert manager.num_free_blocks == 0
    assert sorted(block for block_table in block_tables for block in block_table.blocks) == list(range(1, 8))
    assert {block_table.reused for block_table in block_tables} == {0}


def test_a_prefix_is_reused_but_the_last_token_is_computed_anew():
    manager = BlockManager(9)
    blocks = store(manager, text(1, 2, 3))
    for length, reused in ((1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)):
        block_table = manager.admit(text(1, 2, 3)[:length], 60)
        assert (block_table.reused, len(block_table.blocks)) == (reused, 4)
        assert block_table.blocks[: reused // BLOCK_SIZE] == blocks[: reused // BLOCK_SIZE]
        manager.release(block_table)


def test_a_block_is_found_only_after_the_very_same_text():
    manager = BlockManager(20)
    store(manager, text(1, 2, 3))
    assert stored(manager, text(1, 2, 3)) == 48
    assert stored(manager, text(2, 3)) == 0
    assert stored(manager, text(4, 2, 3)) == 0
    assert stored(manager, text(1, 3)) == 16
    assert stored(manager, [*text(1, 2)[:-1], 7]) == 16


def test_a_partly_filled_block_is_not_shared():
    manager = BlockManager(20)
    store(manager, text(1, 2)[:-1])
    assert stored(manager, text(1, 2)) == 16


def test_rows_share_what_a_running_row_has_published_and_own_the_rest():
    manager = BlockManager(20)
    first = manager.admit(text(1, 2, 3), 70)
    assert stored(manager, text(1, 2, 3)) == 0  # not computed yet
    manager.publish(first, text(1, 2))
    second = manager.admit(text(1, 2, 4), 70)
    assert second.reused == 32
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])
    manager.release(first)
    assert manager.num_free_blocks == 19 - 5
    third = manager.admit([9], 14 * BLOCK_SIZE)  # all that is free: the shared blocks are not among it
    assert not set(third.blocks) & set(second.blocks)


def test_of_equal_texts_the_blocks_published_first_stay():
    manager = BlockManager(20)
    first, second = (manager.admit(text(1, 2), 40) for _ in range(2))
    manager.publish(first, text(1, 2))
    manager.publish(second, text(1, 2))
    third = manager.admit(text(1, 2, 3), 48)
    assert third.blocks[:2] == first.blocks[:2]
    for block_table in (first, second, third):
        manager.release(block_table)
    assert manager.num_free_blocks == 19


def test_a_full_pool_says_so_and_nothing_has_changed():
    manager = BlockManager(9)
    kept = store(manager, text(1, 2))
    busy = manager.admit([9], 3 * BLOCK_SIZE)
    with pytest.raises(
        CacheFullError, match="97 tokens need 5 blocks of 16 besides 2 reused, and 3 of 8 are free"
    ) as e:
        manager.admit(text(1, 2, 3), 97)  # 5 blocks are free, but the two that it reuses cannot be used twice
    assert "kv_cache_free_gpu_memory_fraction" in str(e.value)
    assert "max_new_tokens" in str(e.value)
    assert manager.num_free_blocks == 5
    block_table = manager.admit(text(1, 2, 3), 80)  # and exactly what is there can be had
    assert block_table.blocks[:2] == kept
    assert manager.num_free_blocks == 0
    manager.release(block_table)
    manager.release(busy)
    assert manager.num_free_blocks == 8
    assert len(set(manager.admit([9], 8 * BLOCK_SIZE).blocks)) == 8


def test_blocks_without_a_text_are_used_before_any_is_evicted():
    manager = BlockManager(6)
    store(manager, text(1, 2))
    manager.release(manager.admit([9], 3 * BLOCK_SIZE))
    assert stored(manager, text(1, 2)) == 32


def test_the_least_recently_used_text_is_evicted_first_and_its_end_before_its_beginning():
    manager = BlockManager(6)
    store(manager, text(1, 2))
    store(manager, text(3, 4))
    manager.release(manager.admit(text(1, 2, 9), 3 * BLOCK_SIZE))  # uses the older text again: now it is the newer one
    left = []
    for needed in range(1, 6):
        fork = deepcopy(manager)
        fork.release(fork.admit([9], needed * BLOCK_SIZE))
        left.append((stored(fork, text(3, 4)), stored(fork, text(1, 2))))
    assert left == [(32, 32), (16, 32), (0, 32), (0, 16), (0, 0)]


def test_what_hung_below_an_evicted_block_is_never_found_again():
    manager = BlockManager(9)
    first, second, others = manager.admit(text(1), 16), manager.admit(text(1, 2), 32), manager.admit([9], 48)
    manager.publish(first, text(1))
    manager.publish(second, text(1, 2))  # its second block hangs below the first row's block
    (evicted,) = first.blocks
    manager.release(first)
    third = manager.admit(text(3, 4, 5), 48)
    assert third.blocks[2] == evicted
    manager.release(others)
    assert stored(manager, text(1, 2)) == 0
    manager.publish(third, text(3, 4, 5))  # the evicted block holds another text now
    assert stored(manager, text(3, 4, 5, 2)) == 48
    assert stored(manager, text(1, 2)) == 0
    manager.publish(second, text(1, 2))  # this row still holds both
    assert stored(manager, text(1, 2)) == 32


def test_a_beginning_that_another_row_published_outlasts_the_end():
    manager = BlockManager(6)
    first, second = manager.admit(text(1), 16), manager.admit(text(1, 2), 32)
    manager.publish(first, text(1))
    manager.publish(second, text(1, 2))
    manager.release(first)
    manager.release(second)
    manager.release(manager.admit([9], 4 * BLOCK_SIZE))  # evicts one
    assert stored(manager, text(1, 2)) == 16


def test_a_lease_is_released_once():
    manager = BlockManager(4)
    block_table = manager.admit([1], 40)
    manager.release(block_table)
    with pytest.raises(AssertionError, match="twice"):
        manager.release(block_table)


def test_texts_are_shared_only_under_the_same_salt():
    manager = BlockManager(20)
    for salt in (None, "a", "b"):
        first = manager.admit(text(1, 2), 32, salt=salt)
        assert first.reused == 0
        manager.publish(first, text(1, 2))
        again = manager.admit(text(1, 2), 40, salt=salt)
        assert again.reused == 16
        assert again.blocks[0] == first.blocks[0]
        manager.release(again)
    assert manager.admit(text(1, 2), 32, salt="c").reused == 0


def test_a_salt_is_forgotten_with_its_last_block():
    manager = BlockManager(6)
    for number in range(1000):
        block_table = manager.admit(text(number), 16, salt=f"{number}")
        manager.publish(block_table, text(number)[:3])  # not a whole block
        manager.publish(block_table, text(number))
        manager.release(block_table)
    assert manager.salts == {"995", "996", "997", "998", "999"}
    manager.release(manager.admit([9], 5 * BLOCK_SIZE, salt="x"))
    assert not manager.salts
    assert manager.admit(text(999), 16, salt="999").reused == 0


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


class Row:
    """A row that writes: what its slots hold is all the text up to them, which is what keys and values depend on."""

    def __init__(self, block_table: BlockTable, prompt: list[int], slots: int, memory: dict[tuple[int, int], object]):
        self.block_table, self.slots, self.memory = block_table, slots, memory
        self.text: list[int] = []
        for slot in range(block_table.reused, len(block_table.blocks) * BLOCK_SIZE):
            self.memory[block_table.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = (
                "scratch"  # whatever it may ever write, it does
            )
        self.text = prompt[: block_table.reused]
        self.write(prompt[block_table.reused :])

    def write(self, tokens: list[int]) -> None:
        for token in tokens:
            slot = len(self.text)
            self.text.append(token)
            self.memory[self.block_table.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = tuple(self.text)

    def check(self) -> None:
        for slot in range(len(self.text)):
            assert self.memory[self.block_table.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] == tuple(
                self.text[: slot + 1]
            )


@pytest.mark.parametrize("salts", [[None], [None, "a"]], ids=str)
@pytest.mark.parametrize("blocks", [5, 14, 40])
def test_thousands_of_random_operations_agree_with_a_slow_obvious_model(blocks: int, salts: list[str | None]):
    rng = random.Random(blocks)
    manager, slow = BlockManager(blocks), Slow(blocks)
    rows: list[Row] = []
    memory: dict[tuple[int, int], object] = {}
    reused = refused = 0

    def words(length: int) -> list[int]:  # few different blocks, so that texts often begin alike
        return (text(*(rng.choice((1, 1, 1, 2, 3)) for _ in range(length // BLOCK_SIZE + 1))))[:length]

    for _ in range(2000):
        action = rng.random()
        if action < 0.4:
            prompt = words(rng.randint(1, 5 * BLOCK_SIZE))
            slots = len(prompt) + rng.randint(0, 3 * BLOCK_SIZE)
            salt = rng.choice(salts) if len(salts) > 1 else salts[0]
            try:
                block_table = manager.admit(prompt, slots, salt=salt)
            except CacheFullError:
                slow.admit(prompt, slots, None, salt)
                refused += 1
            else:
                slow.admit(prompt, slots, block_table, salt)
                rows.append(Row(block_table, prompt, slots, memory))
                reused += block_table.reused > 0
        elif rows:
            row = rng.choice(rows)
            if action < 0.6:
                tokens = words(5 * BLOCK_SIZE)[len(row.text) % BLOCK_SIZE :]  # ends of texts meet beginnings of others
                row.write(tokens[: rng.randint(0, row.slots - len(row.text))])
            elif action < 0.8:
                manager.publish(row.block_table, row.text)
                slow.publish(row.block_table.blocks, row.text, row.block_table.salt)
            else:
                slow.release(row.block_table.blocks, row.text, row.block_table.salt)
                manager.release(row.block_table)
                rows.remove(row)
        assert manager.num_free_blocks == len(slow.unheld())
        for row in rows:
            row.check()
    assert reused > 10
    assert refused > 50
    for row in rows:
        slow.release(row.block_table.blocks, row.text, row.block_table.salt)
        manager.release(row.block_table)
    assert manager.num_free_blocks == blocks - 1
    everything = manager.admit([0], (blocks - 1) * BLOCK_SIZE)
    assert sorted(everything.blocks) == list(range(1, blocks))
