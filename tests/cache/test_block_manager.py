"""The blocks of rows, and the prefixes that they share."""

from copy import deepcopy

import pytest

from redrafter.cache.block_manager import BlockManager
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
    store(manager, text(5, 6)[:-1])  # the last block is partly filled, and not shared
    assert stored(manager, text(5, 6)) == 16


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


def test_of_equal_texts_the_blocks_published_first_stay_and_a_row_is_released_once():
    manager = BlockManager(20)
    first, second = (manager.admit(text(1, 2), 40) for _ in range(2))
    manager.publish(first, text(1, 2))
    manager.publish(second, text(1, 2))
    third = manager.admit(text(1, 2, 3), 48)
    assert third.blocks[:2] == first.blocks[:2]
    for block_table in (first, second, third):
        manager.release(block_table)
    assert manager.num_free_blocks == 19
    with pytest.raises(AssertionError, match="twice"):
        manager.release(first)


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
