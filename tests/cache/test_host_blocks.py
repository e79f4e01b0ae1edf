"""Texts that go on on the host: where the block manager says they are, and the copies of keys and values."""

import random
from copy import deepcopy

import pytest
import torch

from redrafter.cache import host_blocks as module
from redrafter.cache.block_manager import BlockCopy, BlockManager, BlockTable
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool
from redrafter.errors import ArgumentError, CacheFullError
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


def test_an_evicted_text_is_copied_to_the_host_and_back():
    memory = Memory(4, 10)
    memory.store(text(1, 2))
    memory.store(text(3, 4))  # one block of the first text is evicted, its end
    assert memory.copies == [BlockCopy(True, 2, 1)]
    memory.store(text(5, 6, 7))
    assert memory.manager.num_host_blocks == 4
    assert memory.store([*text(1, 2), 9]) == 2 * BLOCK_SIZE
    assert memory.manager.onboarded == 2


def test_without_a_host_an_evicted_text_is_forgotten():
    memory = Memory(4, 0)
    memory.store(text(1, 2))
    memory.store(text(5, 6, 7))
    assert memory.store([*text(1, 2), 9]) == 0
    assert not memory.copies


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


def test_texts_on_the_host_have_salts_too():
    memory = Memory(4, 10)
    memory.store(text(1, 2), "a")
    memory.store(text(5, 6, 7), "b")
    assert memory.store([*text(1, 2), 9], "b") == 0
    assert memory.store([*text(1, 2), 9], "a") == 32


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


def test_a_full_device_changes_nothing():
    memory = Memory(4, 10)
    memory.store(text(1, 2))
    held = memory.admit(text(3, 4), 2 * BLOCK_SIZE)
    with pytest.raises(CacheFullError):
        memory.admit([*text(1, 2), 9], 33)
    assert memory.manager.num_free_blocks == 1
    memory.manager.release(held)
    assert memory.store([*text(1, 2), 9]) == 32


def test_all_is_forgotten_on_demand_and_rows_go_on():
    memory = Memory(5, 10)
    memory.store(text(1, 2))
    held = memory.admit(text(3, 4), 2 * BLOCK_SIZE)
    memory.manager.publish(held, text(3, 4))
    memory.store(text(5, 6))
    memory.manager.forget()
    assert (memory.manager.num_host_blocks, memory.manager.num_free_blocks) == (0, 2)
    assert not memory.manager.salts
    memory.manager.publish(held, text(3, 4))
    memory.manager.release(held)
    assert memory.store([*text(3, 4), 9]) == 32


@pytest.mark.parametrize("host_blocks", [0, 2, 3, 9, 2000])
@pytest.mark.parametrize("blocks", [6, 14])
def test_thousands_of_random_operations_find_what_was_published(blocks: int, host_blocks: int):
    rng = random.Random(blocks * host_blocks)
    memory, published = Memory(blocks, host_blocks), set[Text]()
    manager, rows, found = memory.manager, list[tuple[BlockTable, list[int], int]](), 0

    def words(length: int) -> list[int]:  # few different blocks, so that texts often begin alike
        return text(*(rng.choice((1, 1, 1, 2, 3)) for _ in range(length // BLOCK_SIZE + 1)))[:length]

    for _ in range(3000):
        action = rng.random()
        if action < 0.4:
            prompt, salt = words(rng.randint(1, 5 * BLOCK_SIZE)), rng.choice([None, "a"])
            slots = len(prompt) + rng.randint(0, 2 * BLOCK_SIZE)
            try:
                table = memory.admit(prompt, slots, salt)
            except CacheFullError:
                continue
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
            elif action < 0.6:
                try:
                    manager.grow(table, slots + BLOCK_SIZE)
                except CacheFullError:
                    continue
                memory.copy()
                rows[rows.index(row)] = (table, tokens, slots + BLOCK_SIZE)
                memory.write(table, tokens)
            else:
                full = len(tokens) // BLOCK_SIZE
                manager.publish(table, tokens)
                published |= {(table.salt, *tokens[: (index + 1) * BLOCK_SIZE]) for index in range(full)}
            if action > 0.8:
                manager.release(table)
                rows.remove(row)
        assert manager.num_host_blocks <= max(host_blocks - 1, 0)
        for table, tokens, _ in rows:
            for index in range(len(tokens) // BLOCK_SIZE):
                assert memory.device[table.blocks[index]] == (table.salt, *tokens[: (index + 1) * BLOCK_SIZE])
    assert found > 1000
    assert (manager.onboarded > 0) == (host_blocks > 0)
    for table, _, _ in rows:
        manager.release(table)
    manager.forget()
    assert (manager.num_free_blocks, manager.num_host_blocks) == (blocks - 1, 0)
    assert sorted(manager.admit([0], (blocks - 1) * BLOCK_SIZE).blocks) == list(range(1, blocks))
    assert not manager.take_copies()


def test_places_of_forgotten_texts_are_used_again():
    memory = Memory(4, 5)
    for _ in range(3):
        for piece in range(10):
            memory.store(text(piece))
        assert memory.manager.num_host_blocks == 4
        memory.manager.forget()


CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 4, 4, torch.bfloat16, CPU), LayerShape(1, 3, 5, torch.float32, CPU)]


def filled(blocks: int) -> KVCachePool:
    """Return a pool whose slots hold the number of their block."""
    store = KVCachePool(SHAPES, blocks)
    for pool in store.pools:
        pool += (torch.arange(blocks).repeat_interleave(BLOCK_SIZE))[:, None, None]
    return store


def contents(store: KVCachePool) -> list[int]:
    """Return the number that all slots of each block hold."""
    stacked = torch.cat([pool.float().flatten(2).transpose(0, 1).flatten(1) for pool in store.pools], 1)
    by_block = stacked.unflatten(0, (-1, BLOCK_SIZE)).flatten(1)
    assert torch.equal(by_block, by_block[:, :1].expand_as(by_block))
    return [int(x) for x in by_block[:, 0]]


@pytest.mark.parametrize("staging_bytes", [1, 5000, 1 << 20])
def test_blocks_of_all_models_are_copied_there_and_back(staging_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STAGING_BYTES", staging_bytes)
    stores = [filled(8), filled(8)]
    host = HostBlocks(stores, 6)
    host.copy([BlockCopy(True, block, place) for block, place in ((3, 1), (7, 2), (2, 5), (4, 3))])
    for store in stores:
        for pool in store.pools:
            pool.zero_()
    host.copy([BlockCopy(False, place, block) for block, place in ((1, 1), (2, 2), (6, 5), (7, 3))])
    assert [contents(store) for store in stores] == [[0, 3, 7, 0, 0, 0, 2, 4]] * 2


def test_copies_are_made_in_their_order():
    store = filled(5)
    HostBlocks([store], 3).copy(
        [
            BlockCopy(True, 1, 1),
            BlockCopy(True, 2, 1),  # in its place
            BlockCopy(False, 1, 3),
            BlockCopy(True, 4, 1),
            BlockCopy(False, 1, 1),
        ]
    )
    assert contents(store) == [0, 4, 2, 2, 4]


def test_the_hosts_memory_is_divided_as_the_devices_is():
    stores = [KVCachePool(SHAPES[:1], 10), KVCachePool(SHAPES, 30)]
    size = sum(pool.nbytes for store in stores for pool in store.pools)
    assert [host.num_blocks for host in HostBlocks.of_size(2 * size, [stores[:1], stores[1:]])] == [20, 60]
    assert [host.num_blocks for host in HostBlocks.of_size(size, [stores[:1]])] > [10]


def test_memory_for_less_than_a_block_is_refused():
    with pytest.raises(ArgumentError, match=r"--kv-host-cache-gib\) is .* give 1.\de-06 at least"):
        HostBlocks.of_size(10, [[KVCachePool(SHAPES, 10)]])


def test_more_memory_than_is_free_is_refused():
    with pytest.raises(ArgumentError, match=r"GiB of the machine's memory are free: give \d+ or less"):
        HostBlocks.of_size(1 << 60, [[KVCachePool(SHAPES, 10)]])
