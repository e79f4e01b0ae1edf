"""Keys and values of blocks on the host, where they outlast their device blocks, and the copies both ways."""

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import psutil
import torch
from torch import Tensor

from redrafter.cache.block_manager import BlockCopy
from redrafter.cache.paged import KVCachePool
from redrafter.cache.to_device import to_device
from redrafter.errors import ArgumentError
from redrafter.kernels.block_size import BLOCK_SIZE

_LOG = logging.getLogger(__name__)
STAGING_BYTES = 128 << 20  # device buffer through which all copies go


class HostBlocks:
    """Memory of the host for blocks of one or several models, whose blocks have the same ids.

    The blocks of a copy are gathered into a staging buffer, or scattered from it, on the compute stream; only the
    copies between that buffer and the host run on a stream of their own. So a block may be written as soon as its copy
    to the host is launched, and read as soon as its copy to the device is.

    Attributes:
        num_blocks: Number of blocks, including block 0, which is not used.
    """

    def __init__(self, stores: Sequence[KVCachePool], num_blocks: int):
        """Allocate the memory; on a GPU it is pinned, which takes a second for some GiB."""
        self.num_blocks = num_blocks
        self._pools = [_by_block(pool) for store in stores for pool in store.pools]
        self._device = self._pools[0].device
        block_bytes = sum(pool[0].nbytes for pool in self._pools)
        staged = max(min(STAGING_BYTES // block_bytes, num_blocks), 1)
        self._staging = [pool.new_empty(staged, *pool.shape[1:]) for pool in self._pools]
        self._memory = [torch.empty(num_blocks, *pool.shape[1:], dtype=pool.dtype) for pool in self._pools]
        self._stream = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            began = time.monotonic()
            for memory in self._memory:
                _pin(memory)
            gib, seconds = num_blocks * block_bytes / 2**30, time.monotonic() - began
            _LOG.info("pinned %.1f GiB of the host's memory for keys and values in %.1f s", gib, seconds)

    @classmethod
    def of_size(cls, num_bytes: int, stores: Sequence[KVCachePool]) -> "HostBlocks":
        """Allocate blocks for models in so many bytes of the host's memory.

        Raises:
            ArgumentError: The size is less than one block, or more than the free memory.
        """
        free = psutil.virtual_memory().available
        if num_bytes > free:
            raise ArgumentError(
                f"kv_host_cache_gib (--kv-host-cache-gib) is {num_bytes / 2**30:.4g}, and {free / 2**30:.1f} GiB of "
                f"the machine's memory are free: give {int(0.9 * free / 2**30)} or less"
            )
        block_bytes = sum(pool.nbytes for store in stores for pool in store.pools) / stores[0].num_blocks
        if num_bytes < 2 * block_bytes:
            raise ArgumentError(
                f"kv_host_cache_gib (--kv-host-cache-gib) is {num_bytes / 2**30:.4g}, less than one block of "
                f"{BLOCK_SIZE} tokens: give at least {1.01 * 2 * block_bytes / 2**30:.2g}"
            )
        return cls(stores, int(num_bytes / block_bytes))

    @torch.inference_mode()
    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Launch copies between the device and the host, in their order."""
        # Runs of one direction: the order between directions matters, as a host block may be read and then reused.
        for to_host, run in groupby(copies, key=lambda copy: copy.to_host):
            # of several copies to one block, only the last one counts
            sources = {copy.target: copy.source for copy in run}
            pairs, size = list(sources.items()), len(self._staging[0])
            # In parts of the staging buffer, whose size bounds the device memory that copies take.
            for start in range(0, len(pairs), size):
                targets, read = zip(*pairs[start : start + size], strict=True)
                blocks, host_blocks = (read, targets) if to_host else (targets, read)
                index = to_device(blocks, self._device, torch.long)
                if to_host:
                    # The stream of copies may still read the staging buffer for the blocks before these.
                    self._wait_for_copies()
                    for pool, staging in zip(self._pools, self._staging, strict=True):
                        torch.index_select(pool, 0, index, out=staging[: len(blocks)])
                with self._on_copy_stream():
                    for memory, staging in zip(self._memory, self._staging, strict=True):
                        # Consecutive host blocks are one copy: small ones do not saturate the bus.
                        for first, host_block, count in _runs(host_blocks):
                            both = memory[host_block : host_block + count], staging[first : first + count]
                            target, source = both if to_host else reversed(both)
                            target.copy_(source, non_blocking=True)
                if not to_host:
                    # The blocks are in the staging buffer only once that stream has finished the copy.
                    self._wait_for_copies()
                    for pool, staging in zip(self._pools, self._staging, strict=True):
                        pool.index_copy_(0, index, staging[: len(blocks)])

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Enter the copy stream after the kernels launched so far; later kernels do not wait for it."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _wait_for_copies(self) -> None:
        """Make kernels launched from now on wait for the copies from and to the staging buffers."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _by_block(pool: Tensor) -> Tensor:
    """Return a view `[blocks, G, W]` int64 of the bytes of a pool `[G, blocks * BLOCK_SIZE, heads, dim]`."""
    layers, slots = pool.shape[:2]
    return pool.view(layers, slots // BLOCK_SIZE, -1).view(torch.int64).transpose(0, 1)


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the position, the first id and the length of each run of consecutive ids."""
    first = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[place - 1] + 1:
            yield first, ids[first], place - first
            first = place


def _pin(memory: Tensor) -> None:
    """Pin a host tensor in place, until it is freed; torch's own pinned memory is rounded up to a power of two.

    Raises:
        ArgumentError: The operating system does not allow it.
    """
    cuda = torch.cuda.cudart()
    if code := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise ArgumentError(
            f"{memory.nbytes / 2**30:.1f} GiB of the host's memory cannot be pinned (CUDA error {code}): lower "
            "kv_host_cache_gib (--kv-host-cache-gib)"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
