"""What block managers refuse and forget; test_evicted_texts.py compares them with a slow one."""

import pytest

from redrafter.cache.block_manager import BlockManager
from redrafter.errors import CacheFullError
from redrafter.kernels.block_size import BLOCK_SIZE


def text(*pieces: int) -> list[int]:
    """Return a full block of tokens for each number."""
    return [100 * piece + i for piece in pieces for i in range(BLOCK_SIZE)]


def test_a_full_pool_says_how_many_blocks_are_missing():
    manager = BlockManager(9)
    kept = manager.admit(text(1, 2), 2 * BLOCK_SIZE)
    manager.publish(kept, text(1, 2))
    manager.release(kept)
    manager.admit([9], 3 * BLOCK_SIZE)
    with pytest.raises(
        CacheFullError, match="97 tokens need 5 blocks of 16 besides 2 reused, and 3 of 8 are free"
    ) as refusal:
        manager.admit(text(1, 2, 3), 97)  # 5 blocks are free, but the two that it reuses cannot be used twice
    assert "kv_cache_free_gpu_memory_fraction" in str(refusal.value)
    assert "max_new_tokens" in str(refusal.value)


def test_a_row_is_released_once():
    manager = BlockManager(9)
    block_table = manager.admit(text(1), BLOCK_SIZE)
    manager.release(block_table)
    with pytest.raises(AssertionError, match="twice"):
        manager.release(block_table)


def test_rows_are_admitted_while_there_are_states_for_them():
    manager = BlockManager(20, rows=2)
    tables = [manager.admit([1, 2, 3], 4), manager.admit([1, 2, 3], 4)]
    assert sorted(table.state_row for table in tables) == [1, 2]
    with pytest.raises(CacheFullError, match="the recurrent states of all rows"):
        manager.admit([4], 2)
    assert manager.num_free_blocks == 17
    freed = tables[0].state_row
    manager.release(tables[0])
    assert manager.admit([4], 2).state_row == freed


def test_a_salt_is_forgotten_with_its_last_block():
    manager = BlockManager(6)
    for number in range(1000):
        block_table = manager.admit(text(number), 16, salt=f"{number}")
        manager.publish(block_table, text(number)[:3])  # not a whole block
        manager.publish(block_table, text(number))
        manager.release(block_table)
    assert manager.roots.keys() == {"995", "996", "997", "998", "999"}
    manager.release(manager.admit([9], 5 * BLOCK_SIZE, salt="x"))
    assert not manager.roots
    assert manager.admit(text(999), 16, salt="999").reused == 0
