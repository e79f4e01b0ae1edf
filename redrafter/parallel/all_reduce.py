"""Sums of small messages over the GPUs of one machine, which access each other's memory.

A layer of a decoding step adds partial sums of a few kilobytes twice, and NCCL takes about 10 us for each. torch's
symmetric memory lets a GPU read the buffers of its peers: in one shot each rank reads the whole message of all others,
in two shots each rank adds its share of the message and the others read the result. The smallest messages are sent
instead, into inboxes of the peers, by a kernel of this project in one launch (`redrafter.kernels.peer_sum`). None of
them uses multicast.

All add the parts of an element in the order of ranks, whatever the size of the message, so the number of rows of a
step does not change the bits of a row's sum. NCCL sums what they cannot: larger messages, as of prompts, and other
dtypes. Its order is its own, which is the same for two ranks, as addition is commutative.
"""

import logging
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from redrafter import kernels
from redrafter.errors import UnsupportedError, first_line

_LOG = logging.getLogger(__name__)

# Bytes up to which one shot is taken, by the number of ranks: with more ranks it reads more. Two shots have one more
# wait for all ranks. torch has kernels for these numbers of ranks.
ONE_SHOT_BYTES = {2: 1 << 20, 4: 1 << 18, 8: 1 << 17}
# Bytes up to which messages are sent into inboxes: each of the others receives the message, in twice its bytes. Larger
# ones were not measured, and 8 ranks neither.
SENT_BYTES = {2: 256 << 10, 4: 256 << 10, 8: 32 << 10}
MAX_BYTES = 4 << 20  # size of the buffer; for larger messages NCCL is as fast
UNIT = 16  # bytes that a thread loads at once, of which a message has a whole number
DTYPES = (torch.bfloat16, torch.float32)  # those of torch's kernels
_SENT = "peer_sum"  # of this project's kernels
_NAMES = ("one_shot_all_reduce_out", "two_shot_all_reduce_out")
# Collectives as operators, which torch.compile can trace and a CUDA graph can contain.
_OPS = torch.ops._c10d_functional  # noqa: SLF001 -- torch's public functions return another kind of tensor


def collective_sum(x: Tensor, group_name: str) -> Tensor:
    """Return the sum of every rank's `x` by the backend of a process group, NCCL or gloo."""
    total: Tensor = _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group_name))
    return total


class PeerMemory:
    """A buffer on each GPU that its peers can read, and sums of the messages in it; inboxes that they write.

    One message is in the buffer at a time: all calls are on one stream, and a kernel ends when all ranks have read.

    Attributes:
        group_name: Name of the process group.
        size: Number of its ranks.
        operators: The namespace of torch's operators.
        buffer: The memory of this rank, `[MAX_BYTES]` uint8; empty before `allocate`.
        inboxes: Addresses of the inboxes of all ranks, `[N]` int64; empty where no message is sent into them.
    """

    def __init__(self, group_name: str, size: int, operators: Any = torch.ops.symm_mem):
        """Make a memory without a buffer; the arguments are the attributes."""
        self.group_name: Any = group_name  # torch has a type of its own for such names
        self.size, self.operators = size, operators
        self.buffer = self._memory = torch.empty(0, dtype=torch.uint8)  # the memory is the buffer, then an inbox
        self.inboxes = torch.empty(0, dtype=torch.long)
        self._rank, self._calls = 0, torch.empty(0, dtype=torch.int32)  # of each part of a sent message
        self._one_shot, self._sent = ONE_SHOT_BYTES.get(size, 0), SENT_BYTES.get(size, 0)

    def allocate(self, device: torch.device) -> None:
        """Allocate the buffer of this rank; multicast is not used, and must not be set up."""
        # A program that sets up multicast can put the GPUs of a shared host out of service.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        from torch.distributed import _symmetric_memory as symmetric_memory  # which a CPU does not need

        inbox = 8 * kernels.inbox_words(self._sent, self.size) if kernels.TRITON else 0
        self._memory = symmetric_memory.empty(MAX_BYTES + inbox, dtype=torch.uint8, device=device)
        self.buffer = self._memory[:MAX_BYTES]
        self._memory.zero_()  # no number of a call
        torch.cuda.synchronize(device)  # before a peer writes

    def connect(self) -> None:
        """Exchange the addresses of all ranks' buffers, once: later calls look them up. Collective."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(self._memory, self.group_name)
        if kernels.TRITON:
            inboxes = [address + MAX_BYTES for address in handle.buffer_ptrs]
            self.inboxes = torch.tensor(inboxes, device=self.buffer.device)
            parts = kernels.peer_sum_parts(self._sent)
            self._rank, self._calls = handle.rank, self._calls.new_zeros(parts, device=self.buffer.device)
        PEER_MEMORIES[self.group_name] = self

    def check_sums(self, rank: int) -> None:
        """Raise `UnsupportedError` unless every kind of sum equals the process group's. Collective."""
        limits = (self._sent, self._one_shot)
        for dtype in DTYPES:
            for nbytes in (UNIT, 8 << 10, *(limit + more for limit in limits for more in (0, UNIT)), MAX_BYTES):
                count = nbytes // dtype.itemsize
                # Small integers, whose sums are exact in any order.
                x = (torch.arange(count, device=self.buffer.device) % 13 + rank).to(dtype)
                if not torch.equal(self.sum(x), collective_sum(x, self.group_name)):
                    raise UnsupportedError(f"a sum of {nbytes} bytes of {dtype} differs from the process group's")

    def kernel_for(self, x: Tensor) -> str | None:
        """Return the name of the operator that sums a message of this size and dtype; None for the process group."""
        if x.dtype not in DTYPES or x.nbytes % UNIT or not 0 < x.nbytes <= len(self.buffer):
            return None
        if len(self.inboxes) and x.nbytes <= self._sent:
            return _SENT
        return _NAMES[x.nbytes > self._one_shot]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, of any shape, with the same bits on all of them."""
        kernel = self.kernel_for(x)
        if kernel is None:
            return collective_sum(x, self.group_name)
        if kernel == _SENT:
            return kernels.peer_sum(x.contiguous(), self.inboxes, self._calls, self._rank, self._sent)
        # Not the operators that copy `x` themselves: their blocks signal before all of their threads have copied.
        message = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        message.copy_(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        getattr(self.operators, kernel)(message, "sum", self.group_name, out)
        return out


PEER_MEMORIES: dict[str, PeerMemory] = {}  # by the name of the process group, as operators take no objects


# The operator selects a kernel when it runs, or is captured, as a compiled forward has any number of tokens. It writes
# to the buffer although its schema declares no mutation: only these operators use it, in the order of the forward.
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
    memory = PeerMemory(group.group_name, size)
    stages: tuple[Callable[[], None], ...] = (
        lambda: check_places(places, rank),
        lambda: memory.allocate(device),
        memory.connect,
        lambda: memory.check_sums(rank),
    )
    for stage in stages:
        error = None
        try:
            stage()
        except Exception as failure:  # of torch's operators, which have no common type
            error = first_line(failure)
        if (reason := next(filter(None, exchange(error)), None)) is not None:
            PEER_MEMORIES.pop(group.group_name, None)
            if device.type == "cuda":
                _LOG.info("sums over GPUs are NCCL's, which is slower for few tokens: %s", reason)
            return False
    return True


def check_places(places: list[Any], rank: int) -> None:
    """Raise `UnsupportedError` unless the GPUs at these hosts and indices can read each other's memory."""
    if any(kind != "cuda" or not has_cuda for _, kind, _, has_cuda in places):
        raise UnsupportedError("not all ranks have an NVIDIA GPU")
    if len(places) not in ONE_SHOT_BYTES:
        raise UnsupportedError(f"there are kernels for {', '.join(map(str, ONE_SHOT_BYTES))} ranks, not {len(places)}")
    if len({host for host, *_ in places}) > 1:
        raise UnsupportedError("the ranks are on several hosts")
    if missing := [name for name in _NAMES if not hasattr(torch.ops.symm_mem, name)]:
        raise UnsupportedError(f"torch {torch.__version__} has no operator {missing[0]}")
    indices = [index for _, _, index, _ in places]
    if len(set(indices)) < len(indices):
        # Where each process sees its GPU alone, all have the index 0.
        raise UnsupportedError("the processes do not see all GPUs (CUDA_VISIBLE_DEVICES), one for each rank")
    own = indices[rank]
    for other in indices:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            raise UnsupportedError(f"GPU {own} cannot read the memory of GPU {other}")
