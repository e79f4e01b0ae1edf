"""Copies between the device and the host: of the keys and values of blocks, and of numbers."""

import pytest
import torch

from redrafter.cache import host_blocks as module
from redrafter.cache.block_manager import BlockCopy
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool
from redrafter.cache.to_device import to_device
from redrafter.errors import ArgumentError
from redrafter.kernels.block_size import BLOCK_SIZE

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


def test_blocks_on_the_host_hold_what_blocks_of_all_models_hold():
    stores = [KVCachePool(SHAPES[:1], 10), KVCachePool(SHAPES, 10)]
    size = sum(pool.nbytes for store in stores for pool in store.pools)
    assert HostBlocks.of_size(2 * size, stores).num_blocks == 20
    assert HostBlocks.of_size(size, stores[:1]).num_blocks > 10


@pytest.mark.parametrize(
    ("num_bytes", "named"),
    [
        (10, r"--kv-host-cache-gib\) is .* give at least 1.\de-06"),
        (1 << 60, r"GiB of the machine's memory are free: give \d+ or less"),
    ],
)
def test_memory_for_less_than_a_block_or_more_than_is_free_is_refused(num_bytes, named):
    with pytest.raises(ArgumentError, match=named):
        HostBlocks.of_size(num_bytes, [KVCachePool(SHAPES, 10)])


def test_numbers_are_made_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):  # as `torch.set_default_device("cuda")`, whose tensors cannot be pinned
        copy = to_device([3, 1, 2], CPU, torch.long)
    assert copy.tolist() == [3, 1, 2]
