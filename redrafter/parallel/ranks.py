"""The processes that compute one model together, and the messages between them."""

import atexit
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch import distributed as dist

from redrafter.errors import ArgumentError, MismatchError, ReDrafterError, first_line
from redrafter.parallel.all_reduce import COLLECTIVES, collective_sum, open_peer_memory, peer_sum
from redrafter.parallel.launched import launched_processes, local_rank

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)  # after which a rank that waits for the others fails


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that compute one model together. All run the same program and call the same methods in order.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes; 1 for a model in one process, where every method returns its argument.
        group: The process group of tensors on the model's device; None in one process.
        host_group: The process group of Python objects; None in one process.
        peers: Processes of the other ranks on this machine, by rank.
        reads_peers: Whether the GPUs read each other's memory, by which small messages are summed.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    host_group: Any = None
    peers: Mapping[int, psutil.Process] = field(default_factory=dict)
    reads_peers: bool = False

    @classmethod
    def of_world(cls) -> "Ranks":
        """Return all processes of torch.distributed. Collective: call it on every rank."""
        rank, size = dist.get_rank(), dist.get_world_size()
        # Python objects use the host: NCCL would need them on the GPU, and wait for its work.
        host_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        peers = _find_peers(rank, size, host_group)
        reads_peers = open_peer_memory(rank, dist.group.WORLD, host_group)
        return cls(rank, size, dist.group.WORLD, host_group, peers, reads_peers)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, of any shape, with the same bits on all of them."""
        if self.size == 1:
            return x
        total: Tensor = (peer_sum if self.reads_peers else collective_sum)(x, self.group.group_name)
        return total

    def join_last(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, `[..., N]` each, concatenated in the order of ranks, `[..., size * N]`."""
        if self.size == 1:
            return x
        gathered = COLLECTIVES.all_gather_into_tensor(x.contiguous()[None], self.size, self.group.group_name)
        parts = COLLECTIVES.wait_tensor(gathered)
        return parts.movedim(0, -2).flatten(-2)  # [size, ..., N] to [..., size * N]

    def of_first(self, *tensors: Tensor) -> list[Tensor]:
        """Return rank 0's tensors, which have the same shapes and dtypes on every rank, by one collective."""
        if self.size == 1:
            return list(tensors)
        # The widest dtype first, so that each tensor starts at a multiple of its element size.
        order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
        packed = torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in order])
        packed = COLLECTIVES.wait_tensor(COLLECTIVES.broadcast(packed, 0, self.group.group_name))
        parts = packed.split([tensors[index].nbytes for index in order])
        received = {
            index: part.view(tensors[index].dtype).view(tensors[index].shape)
            for index, part in zip(order, parts, strict=True)
        }
        return [received[index] for index in range(len(tensors))]

    def from_first(self, value: T) -> T:
        """Return rank 0's `value`, which must be picklable."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, which must be picklable, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work` returns on this rank, or raise the first error of any rank on all of them.

        Raises:
            ReDrafterError: `work` raised it, on this rank or another.
        """
        error = None
        try:
            result = work()
        except ReDrafterError as failure:
            error = failure
        if (first := next(filter(None, self.gather(error)), None)) is not None:
            raise first
        return result

    def minimum(self, number: int) -> int:
        """Return the minimum of every rank's `number`."""
        return min(self.gather(number))

    def check_equal(self, value: object, what: str) -> None:
        """Check that all ranks have the same `value`, which must be picklable.

        Args:
            value: Value to compare.
            what: Name of the value in the message.

        Raises:
            MismatchError: The values differ, so the ranks would take different steps.
        """
        first, *others = self.gather(value)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise MismatchError(
                    f"{what} of rank {rank} is {other!r}, and of rank 0 {first!r}: start all ranks on equal "
                    "machines, with equal files and arguments"
                )

    def ended(self) -> list[int]:
        """Return the other ranks whose processes on this machine have ended."""
        return [rank for rank, process in self.peers.items() if _has_ended(process)]

    def stopped(self) -> list[int]:
        """Return the other ranks whose processes on this machine are stopped by a signal, and answer nobody."""
        return [rank for rank, process in self.peers.items() if _status_of(process) == psutil.STATUS_STOPPED]

    def describe_lost(self) -> str | None:
        """Describe which other ranks on this machine have ended or are stopped; None for none."""
        for lost, what in ((self.ended(), "has ended (the launcher reports how)"), (self.stopped(), "is stopped")):
            if lost:
                return f"the process of rank {', '.join(map(str, lost))} {what}"
        return None


ALONE = Ranks()


def _find_peers(rank: int, size: int, group: object) -> dict[int, psutil.Process]:
    """Return the processes of the other ranks on this machine, by rank. Collective."""
    processes: list[Any] = [None] * size
    machine = platform.node()
    mine = psutil.Process()
    dist.all_gather_object(processes, (machine, mine.pid, mine.create_time()), group=group)
    found = {}
    for other, (node, pid, created) in enumerate(processes):
        with suppress(psutil.NoSuchProcess):  # it runs in another container on the same machine
            process = psutil.Process(pid)
            # The creation time guards against a reused process id.
            if other != rank and node == machine and process.create_time() == created:
                found[other] = process
    return found


def _has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it."""
    return not process.is_running() or _status_of(process) in (None, psutil.STATUS_ZOMBIE)


def _status_of(process: psutil.Process) -> str | None:
    """Return the status of a process by psutil's name; None if it has ended."""
    try:
        status: str = process.status()
    except psutil.NoSuchProcess:
        return None
    return status


def check_gpus(size: int, asked: str) -> None:
    """Raise `ArgumentError`, which names what `asked` for them, if this machine has GPUs, but fewer than `size`."""
    if torch.cuda.is_available() and (count := torch.cuda.device_count()) < size:
        raise ArgumentError(f"{asked}: each rank needs a GPU, and this machine has {count}: start {count} at most")


def join_ranks(size: int) -> None:
    """Connect the processes that torchrun has started, unless they are connected.

    Args:
        size: Number of processes that the program needs.

    Raises:
        ArgumentError: Their number is different, or they cannot connect.
    """
    world = dist.get_world_size() if dist.is_initialized() else launched_processes()
    if world != size:
        started = "one process runs" if world == 1 else f"{world} processes run"
        raise ArgumentError(
            f"tp_size={size} is for {size} processes, and {started}: "
            f"start the program with torchrun --nproc-per-node {size}, or a command with --tensor-parallel-size {size}"
        )
    if dist.is_initialized():
        return
    local, on_gpu = local_rank(), torch.cuda.is_available()
    check_gpus(local + 1, f"{size} processes")
    device = torch.device("cuda", local) if on_gpu else None
    if on_gpu:
        # Before the group is opened, as NCCL takes the current device.
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=device)
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(f"the {size} processes cannot reach each other: {first_line(error)}") from error
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
