import random
from copy import deepcopy

import pytest

from redrafter.cache.block_manager import BlockManager, BlockTable
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE


def text(*pieces: int) -> list[int]:
    """One full block of tokens for each number."""
    return [100 * piece + i for piece in pieces for i in range(BLOCK_SIZE)]


def store(pool: BlockManager, tokens: list[int]) -> list[int]:
    """Admit a row, publish its text, release it. Returns its blocks."""
    lease = pool.admit(tokens, len(tokens))
    pool.publish(lease, tokens)
    blocks = lease.blocks
    pool.release(lease)
    return blocks


def stored(pool: BlockManager, tokens: list[int]) -> int:
    """How many of the tokens a row would reuse. A copy is asked, so that nothing is evicted for the question."""
    return deepcopy(pool).admit([*tokens, 0], len(tokens) + 1).reused


def test_a_row_gets_blocks_for_all_its_slots_and_never_block_zero():
    pool = BlockManager(8)
    assert pool.free == 7
    leases = [pool.admit([5], slots) for slots in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE)]
    assert [len(lease.blocks) for lease in leases] == [1, 1, 2, 3] and pool.free == 0
    assert sorted(block for lease in leases for block in lease.blocks) == list(range(1, 8))
    assert {lease.reused for lease in leases} == {0}


def test_a_prefix_is_reused_but_the_last_token_is_computed_anew():
    pool = BlockManager(9)
    blocks = store(pool, text(1, 2, 3))
    for length, reused in ((1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)):
        lease = pool.admit(text(1, 2, 3)[:length], 60)
        assert (lease.reused, len(lease.blocks)) == (reused, 4)
        assert lease.blocks[: reused // BLOCK_SIZE] == blocks[: reused // BLOCK_SIZE]
        pool.release(lease)


def test_a_block_is_found_only_after_the_very_same_text():
    pool = BlockManager(20)
    store(pool, text(1, 2, 3))
    assert stored(pool, text(1, 2, 3)) == 48
    assert stored(pool, text(2, 3)) == 0
    assert stored(pool, text(4, 2, 3)) == 0
    assert stored(pool, text(1, 3)) == 16
    assert stored(pool, [*text(1, 2)[:-1], 7]) == 16


def test_a_partly_filled_block_is_not_shared():
    pool = BlockManager(20)
    store(pool, text(1, 2)[:-1])
    assert stored(pool, text(1, 2)) == 16


def test_rows_share_what_a_running_row_has_published_and_own_the_rest():
    pool = BlockManager(20)
    first = pool.admit(text(1, 2, 3), 70)
    assert stored(pool, text(1, 2, 3)) == 0  # not computed yet
    pool.publish(first, text(1, 2))
    second = pool.admit(text(1, 2, 4), 70)
    assert second.reused == 32 and second.blocks[:2] == first.blocks[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])
    pool.release(first)
    assert pool.free == 19 - 5
    third = pool.admit([9], 14 * BLOCK_SIZE)  # all that is free: the shared blocks are not among it
    assert not set(third.blocks) & set(second.blocks)


def test_of_equal_texts_the_blocks_published_first_stay():
    pool = BlockManager(20)
    first, second = (pool.admit(text(1, 2), 40) for _ in range(2))
    pool.publish(first, text(1, 2))
    pool.publish(second, text(1, 2))
    third = pool.admit(text(1, 2, 3), 48)
    assert third.blocks[:2] == first.blocks[:2]
    for lease in (first, second, third):
        pool.release(lease)
    assert pool.free == 19


def test_a_full_pool_says_so_and_nothing_has_changed():
    pool = BlockManager(9)
    kept = store(pool, text(1, 2))
    busy = pool.admit([9], 3 * BLOCK_SIZE)
    with pytest.raises(
        CacheFullError, match="97 tokens need 5 blocks of 16 besides 2 reused, and 3 of 8 are free"
    ) as e:
        pool.admit(text(1, 2, 3), 97)  # 5 blocks are free, but the two that it reuses cannot be used twice
    assert "kv_cache_free_gpu_memory_fraction" in str(e.value) and "max_new_tokens" in str(e.value)
    assert pool.free == 5
    lease = pool.admit(text(1, 2, 3), 80)  # and exactly what is there can be had
    assert lease.blocks[:2] == kept and pool.free == 0
    pool.release(lease)
    pool.release(busy)
    assert pool.free == 8 and len(set(pool.admit([9], 8 * BLOCK_SIZE).blocks)) == 8


def test_blocks_without_a_text_are_used_before_any_is_evicted():
    pool = BlockManager(6)
    store(pool, text(1, 2))
    pool.release(pool.admit([9], 3 * BLOCK_SIZE))
    assert stored(pool, text(1, 2)) == 32


def test_the_least_recently_used_text_is_evicted_first_and_its_end_before_its_beginning():
    pool = BlockManager(6)
    store(pool, text(1, 2))
    store(pool, text(3, 4))
    pool.release(pool.admit(text(1, 2, 9), 3 * BLOCK_SIZE))  # uses the older text again: now it is the newer one
    left = []
    for needed in range(1, 6):
        fork = deepcopy(pool)
        fork.release(fork.admit([9], needed * BLOCK_SIZE))
        left.append((stored(fork, text(3, 4)), stored(fork, text(1, 2))))
    assert left == [(32, 32), (16, 32), (0, 32), (0, 16), (0, 0)]


def test_what_hung_below_an_evicted_block_is_never_found_again():
    pool = BlockManager(9)
    first, second, others = pool.admit(text(1), 16), pool.admit(text(1, 2), 32), pool.admit([9], 48)
    pool.publish(first, text(1))
    pool.publish(second, text(1, 2))  # its second block hangs below the first row's block
    (evicted,) = first.blocks
    pool.release(first)
    third = pool.admit(text(3, 4, 5), 48)
    assert third.blocks[2] == evicted
    pool.release(others)
    assert stored(pool, text(1, 2)) == 0
    pool.publish(third, text(3, 4, 5))  # the evicted block holds another text now
    assert stored(pool, text(3, 4, 5, 2)) == 48
    assert stored(pool, text(1, 2)) == 0
    pool.publish(second, text(1, 2))  # this row still holds both
    assert stored(pool, text(1, 2)) == 32


def test_a_beginning_that_another_row_published_outlasts_the_end():
    pool = BlockManager(6)
    first, second = pool.admit(text(1), 16), pool.admit(text(1, 2), 32)
    pool.publish(first, text(1))
    pool.publish(second, text(1, 2))
    pool.release(first)
    pool.release(second)
    pool.release(pool.admit([9], 4 * BLOCK_SIZE))  # evicts one
    assert stored(pool, text(1, 2)) == 16


def test_a_lease_is_released_once():
    pool = BlockManager(4)
    lease = pool.admit([1], 40)
    pool.release(lease)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(lease)


def test_texts_are_shared_only_under_the_same_salt():
    pool = BlockManager(20)
    for salt in (None, "a", "b"):
        first = pool.admit(text(1, 2), 32, salt=salt)
        assert first.reused == 0
        pool.publish(first, text(1, 2))
        again = pool.admit(text(1, 2), 40, salt=salt)
        assert again.reused == 16 and again.blocks[0] == first.blocks[0]
        pool.release(again)
    assert pool.admit(text(1, 2), 32, salt="c").reused == 0


def test_a_salt_is_forgotten_with_its_last_block():
    pool = BlockManager(6)
    for number in range(1000):
        lease = pool.admit(text(number), 16, salt=f"{number}")
        pool.publish(lease, text(number)[:3])  # not a whole block
        pool.publish(lease, text(number))
        pool.release(lease)
    assert set(pool._roots) == {"995", "996", "997", "998", "999"}
    pool.release(pool.admit([9], 5 * BLOCK_SIZE, salt="x"))
    assert not pool._roots and not pool._nodes


class Slow:
    """The same pool without a trie: whole texts as keys, a clock, and everything searched for. A salt is a first token
    that no other text has."""

    def __init__(self, blocks: int):
        self.all = set(range(1, blocks))
        self.leases: list[list[int]] = []
        self.texts: dict[tuple[object, ...], int] = {}  # salt and whole text up to the end of a block -> that block
        self.used: dict[int, tuple[int, int]] = {}  # block -> when it was last released, and minus its depth
        self.clock = 0

    def unheld(self) -> set[int]:
        return self.all - {block for lease in self.leases for block in lease}

    def reusable(self, prompt: list[int], salt: object) -> list[int]:
        blocks: list[int] = []
        for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
            if (salt, *prompt[:end]) not in self.texts:
                break
            blocks.append(self.texts[(salt, *prompt[:end])])
        return blocks

    def admit(self, prompt: list[int], slots: int, lease: BlockTable | None, salt: object) -> None:
        """Check what the pool answered, None for an error, and follow it."""
        shared = self.reusable(prompt, salt)
        fresh = -(-slots // BLOCK_SIZE) - len(shared)
        usable = self.unheld() - set(shared)
        if lease is None:
            assert fresh > len(usable)
            return
        assert lease.reused == len(shared) * BLOCK_SIZE and lease.blocks[: len(shared)] == shared
        own = set(lease.blocks[len(shared) :])
        assert len(own) == len(lease.blocks) - len(shared) == fresh and own <= usable
        order = sorted(usable, key=lambda block: self.used[block] if block in self.texts.values() else (-1, 0))
        empty = usable - set(self.texts.values())
        assert own <= empty if fresh <= len(empty) else own == set(order[:fresh])
        gone = [known for known, block in self.texts.items() if block in own]
        for known in list(self.texts):
            if any(known[: len(start)] == start for start in gone):
                del self.texts[known]
        self.leases.append(lease.blocks)

    def publish(self, blocks: list[int], tokens: list[int], salt: object) -> None:
        for index in range(len(tokens) // BLOCK_SIZE):
            self.texts.setdefault((salt, *tokens[: (index + 1) * BLOCK_SIZE]), blocks[index])

    def release(self, blocks: list[int], tokens: list[int], salt: object) -> None:
        self.leases.remove(blocks)
        self.clock += 1
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        deepest = max((end for end in ends if self.texts.get((salt, *tokens[:end])) in blocks), default=0)
        for end in range(BLOCK_SIZE, deepest + 1, BLOCK_SIZE):
            self.used[self.texts[(salt, *tokens[:end])]] = (self.clock, -end)


class Row:
    """A row that writes: what its slots hold is all the text up to them, which is what keys and values depend on."""

    def __init__(self, lease: BlockTable, prompt: list[int], slots: int, memory: dict[tuple[int, int], object]):
        self.lease, self.slots, self.memory = lease, slots, memory
        self.text: list[int] = []
        for slot in range(lease.reused, len(lease.blocks) * BLOCK_SIZE):
            self.memory[lease.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = (
                "scratch"  # whatever it may ever write, it does
            )
        self.text = prompt[: lease.reused]
        self.write(prompt[lease.reused :])

    def write(self, tokens: list[int]) -> None:
        for token in tokens:
            slot = len(self.text)
            self.text.append(token)
            self.memory[self.lease.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] = tuple(self.text)

    def check(self) -> None:
        for slot in range(len(self.text)):
            assert self.memory[self.lease.blocks[slot // BLOCK_SIZE], slot % BLOCK_SIZE] == tuple(self.text[: slot + 1])


@pytest.mark.parametrize("salts", [[None], [None, "a"]], ids=str)
@pytest.mark.parametrize("blocks", [5, 14, 40])
def test_thousands_of_random_operations_agree_with_a_slow_obvious_model(blocks: int, salts: list[str | None]):
    rng = random.Random(blocks)
    pool, slow = BlockManager(blocks), Slow(blocks)
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
                lease = pool.admit(prompt, slots, salt=salt)
            except CacheFullError:
                slow.admit(prompt, slots, None, salt)
                refused += 1
            else:
                slow.admit(prompt, slots, lease, salt)
                rows.append(Row(lease, prompt, slots, memory))
                reused += lease.reused > 0
        elif rows:
            row = rng.choice(rows)
            if action < 0.6:
                tokens = words(5 * BLOCK_SIZE)[len(row.text) % BLOCK_SIZE :]  # ends of texts meet beginnings of others
                row.write(tokens[: rng.randint(0, row.slots - len(row.text))])
            elif action < 0.8:
                pool.publish(row.lease, row.text)
                slow.publish(row.lease.blocks, row.text, row.lease.salt)
            else:
                slow.release(row.lease.blocks, row.text, row.lease.salt)
                pool.release(row.lease)
                rows.remove(row)
        assert pool.free == len(slow.unheld())
        for row in rows:
            row.check()
    assert reused > 10 and refused > 50
    for row in rows:
        slow.release(row.lease.blocks, row.text, row.lease.salt)
        pool.release(row.lease)
    assert pool.free == blocks - 1
    everything = pool.admit([0], (blocks - 1) * BLOCK_SIZE)
    assert sorted(everything.blocks) == list(range(1, blocks))
