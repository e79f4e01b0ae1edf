"""Sums of small messages over the GPUs of one machine, which access each other's memory.

A layer of a decoding step adds partial sums of a few kilobytes twice, and NCCL takes 8 us or more for each. Here each
GPU writes into inboxes of the others, in one launch (`redrafter.kernels.peer_sum`): up to some size the whole message,
above it each rank's share of it, whose sum that rank sends to all. Neither uses multicast.

Both add the parts of an element in the order of ranks, whatever the size of the message, so the number of rows of a
step does not change the bits of a row's sum. NCCL sums what they cannot: larger messages, as of prompts, and other
dtypes. Its order is its own, which is the same for two ranks, as addition is commutative.
"""

import logging
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from redrafter import kernels
from redrafter.errors import UnsupportedError, first_line

_LOG = logging.getLogger(__name__)

# Bytes up to which the whole message is sent to each of the others, by the number of ranks, a power of two as Triton's
# ranges are. Measured on H200s for 2 and 4 ranks; the value for 8 is an estimate.
SENT_BYTES = {2: 1 << 20, 4: 256 << 10, 8: 32 << 10}
MAX_BYTES = 4 << 20  # of the largest message that was measured; the inboxes grow with it
PROBE_SECONDS = 60.0  # in which the first messages of all ranks arrive; their kernels may have to be compiled
UNIT = 4  # bytes of a word, of which a message has a whole number
DTYPES = (torch.bfloat16, torch.float32)
# Collectives as operators, which torch.compile can trace and a CUDA graph can contain.
COLLECTIVES = torch.ops._c10d_functional  # noqa: SLF001 -- torch's public functions return another kind of tensor


def collective_sum(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of every rank's `x` by the backend of a process group, NCCL or gloo."""
    total: Tensor = COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x.contiguous(), "sum", group_name))
    return total


class PeerMemory:
    """Inboxes of each GPU that its peers write, and sums of the messages in them.

    All calls are on one stream and in the same order on all ranks.

    Attributes:
        group_name: Name of the process group.
        rank: Number of this process.
        size: Number of ranks.
        memory: The inboxes of this rank, uint8; empty before `allocate`.
    """

    def __init__(self, group_name: str, rank: int, size: int):
        """Make a memory without inboxes; the arguments are the attributes."""
        self.group_name: Any = group_name  # torch has a type of its own for such names
        self.rank, self.size, self.memory = rank, size, torch.empty(0, dtype=torch.uint8)
        self._sent = SENT_BYTES.get(size, 0)
        # Of whole messages, and of messages in shares: addresses of all ranks' inboxes, `[N]` int64, and the number of
        # calls so far of each part of a message, int32.
        self._whole = self._shares = (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.int32))

    def allocate(self, device: torch.device) -> None:
        """Allocate the inboxes of this rank; multicast is not used, and must not be set up."""
        # A program that sets up multicast can put the GPUs of a shared host out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch.distributed import _symmetric_memory as symmetric_memory  # which a CPU does not need

        sizes = (
            kernels.peer_sum.inbox_bytes(self._sent, self.size),
            kernels.peer_sum.share_inbox_bytes(MAX_BYTES, self.size),
        )
        self.memory = symmetric_memory.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.memory.zero_()  # no number of a call
        torch.cuda.synchronize(device)  # before a peer writes

    def connect(self) -> None:
        """Exchange the addresses of all ranks' inboxes, once. Collective."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(self.memory, self.group_name)
        device, first = self.memory.device, kernels.peer_sum.inbox_bytes(self._sent, self.size)
        whole = torch.tensor(handle.buffer_ptrs, device=device)
        parts = kernels.peer_sum.peer_sum_parts(self._sent), kernels.peer_sum.share_parts(MAX_BYTES, self.size)
        calls = [torch.zeros(count, dtype=torch.int32, device=device) for count in parts]
        self._whole, self._shares = (whole, calls[0]), (whole + first, calls[1])

    def probe(self) -> None:
        """Raise `UnsupportedError` if messages of a peer do not arrive in `PROBE_SECONDS`. Collective, the first sums.

        A kernel waits for its peers for ever. If it does, a copy on another stream sends it the missing message,
        so that the GPU can be used without these sums.
        """
        for nbytes in (self._sent, MAX_BYTES):
            # One at a time: a GPU may load the next kernel only once the running one ends.
            self.sum(torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.memory.device))
            done, end = torch.cuda.Event(), time.monotonic() + PROBE_SECONDS
            done.record()
            while not done.query():
                if time.monotonic() > end:
                    self._send_missing()
                    message = f"messages of a GPU did not arrive in another's memory within {PROBE_SECONDS:g} s"
                    raise UnsupportedError(message)
                time.sleep(0.001)

    def _send_missing(self) -> None:
        """Write what a kernel that has waited for its peers' first messages waits for, on another stream."""
        whole = kernels.peer_sum.inbox_bytes(self._sent, self.size)
        # The number of the first call, next to each word and in each flag.
        arrived = torch.ones(len(self.memory) // 4, dtype=torch.int32)
        arrived[: whole // 4 : 2] = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            self.memory.copy_(arrived.view(torch.uint8))

    def check_sums(self) -> None:
        """Raise `UnsupportedError` unless every kind of sum equals the process group's. Collective."""
        for dtype in DTYPES:
            for nbytes in (UNIT, 8 << 10, self._sent, self._sent + UNIT, MAX_BYTES):
                count = nbytes // dtype.itemsize
                # Small integers, whose sums are exact in any order.
                x = (torch.arange(count, device=self.memory.device) % 13 + self.rank).to(dtype)
                if not torch.equal(self.sum(x), collective_sum(x, self.group_name)):
                    raise UnsupportedError(f"a sum of {nbytes} bytes of {dtype} differs from the process group's")

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, of any shape, with the same bits on all of them."""
        if x.dtype not in DTYPES or x.nbytes % UNIT or not 0 < x.nbytes <= MAX_BYTES:
            return collective_sum(x, self.group_name)
        if x.nbytes <= self._sent:
            return kernels.peer_sum.peer_sum(x.contiguous(), *self._whole, self.rank, self._sent)
        return kernels.peer_sum.peer_sum_by_shares(x.contiguous(), *self._shares, self.rank, MAX_BYTES)


PEER_MEMORIES: dict[str, PeerMemory] = {}  # by the name of the process group, as operators take no objects


# The operator selects a kernel when it runs, or is captured, as a compiled forward has any number of tokens. It writes
# to the inboxes although its schema declares no mutation: only these operators use them, in the order of the forward.
@torch.library.custom_op("redrafter::peer_sum", mutates_args=())
def peer_sum(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of every rank's `x` by the peer memory of a process group."""
    return PEER_MEMORIES[group_name].sum(x)


@peer_sum.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def open_peer_memory(rank: int, group: Any, host_group: Any) -> bool:
    """Connect the memory of a group's GPUs if all of them can read each other's, and return whether they can.

    Collective. All ranks decide alike, as each stage ends with an exchange of errors; the reason is logged.

    Args:
        rank: Number of this process.
        group: The process group of tensors on the GPUs.
        host_group: The process group of Python objects.
    """
    size = dist.get_world_size(group)

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=host_group)
        return values

    if group.group_name in PEER_MEMORIES:
        return True
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    places = exchange((platform.node(), device.type, device.index, torch.version.cuda is not None))
    memory = PeerMemory(group.group_name, rank, size)
    stages: tuple[Callable[[], None], ...] = (
        lambda: check_places(places, rank),
        lambda: memory.allocate(device),
        memory.connect,
        memory.probe,
        memory.check_sums,
    )
    for stage in stages:
        error = None
        try:
            stage()
        except Exception as failure:  # of torch's operators, which have no common type
            error = first_line(failure)
        if (reason := next(filter(None, exchange(error)), None)) is not None:
            if device.type == "cuda":
                _LOG.info("sums over GPUs are NCCL's, which is slower for few tokens: %s", reason)
            return False
    PEER_MEMORIES[group.group_name] = memory
    return True


def check_places(places: list[Any], rank: int) -> None:
    """Raise `UnsupportedError` unless the GPUs at these hosts and indices can read each other's memory."""
    if any(kind != "cuda" or not has_cuda for _, kind, _, has_cuda in places):
        raise UnsupportedError("not all ranks have an NVIDIA GPU")
    if not kernels.TRITON:
        raise UnsupportedError("Triton is not installed")
    if len(places) not in SENT_BYTES:
        raise UnsupportedError(f"there are kernels for {', '.join(map(str, SENT_BYTES))} ranks, not {len(places)}")
    if len({host for host, *_ in places}) > 1:
        raise UnsupportedError("the ranks are on several hosts")
    indices = [index for _, _, index, _ in places]
    if len(set(indices)) < len(indices):
        # Where each process sees its GPU alone, all have the index 0.
        raise UnsupportedError("the processes do not see all GPUs (CUDA_VISIBLE_DEVICES), one for each rank")
    own = indices[rank]
    for other in indices:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            raise UnsupportedError(f"GPU {own} cannot read the memory of GPU {other}")
