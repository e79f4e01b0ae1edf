"""Sums over ranks by peer memory: which of torch's operators sums a message, and where the process group does."""

from types import SimpleNamespace

import pytest
import torch

from helpers.ranks import run_on_ranks
from redrafter.parallel import all_reduce
from redrafter.parallel.all_reduce import (
    MAX_BYTES,
    ONE_SHOT_BYTES,
    PEER_MEMORIES,
    SENT_BYTES,
    PeerMemory,
    open_peer_memory,
)
from redrafter.parallel.ranks import Ranks

PLACES = [("host", "cuda", index, True) for index in range(2)]


class Operators:
    """Torch's operators for two equal ranks, which say who was called."""

    def __init__(self) -> None:
        self.called = ""

    def one_shot_all_reduce_out(self, message, what, group_name, out):
        self.called = "one shot"
        torch.mul(message, 2, out=out)

    def two_shot_all_reduce_out(self, message, what, group_name, out):
        self.called = "two shots"
        torch.mul(message, 2, out=out)


@pytest.fixture
def memory(monkeypatch) -> PeerMemory:
    memory = PeerMemory("two", 2, Operators())
    memory.buffer = torch.empty(MAX_BYTES, dtype=torch.uint8)
    monkeypatch.setitem(PEER_MEMORIES, "two", memory)
    monkeypatch.setattr(all_reduce, "collective_sum", lambda x, group_name: 2 * x)
    return memory


@pytest.mark.parametrize(
    ("nbytes", "dtype", "called"),
    [
        (8 << 10, torch.bfloat16, "one shot"),
        (ONE_SHOT_BYTES[2], torch.float32, "one shot"),
        (ONE_SHOT_BYTES[2] + 16, torch.bfloat16, "two shots"),
        (MAX_BYTES, torch.bfloat16, "two shots"),
        (MAX_BYTES + 16, torch.bfloat16, ""),
        (8 << 10, torch.float16, ""),
        (8 << 10, torch.float64, ""),
        (24, torch.bfloat16, ""),  # no multiple of what a thread loads
        (0, torch.bfloat16, ""),
    ],
)
def test_size_and_dtype_of_a_message_select_what_sums_it(memory, nbytes, dtype, called):
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
    total = Ranks(0, 2, SimpleNamespace(group_name="two"), reads_peers=True).sum(x)
    assert memory.operators.called == called
    assert torch.equal(total, 2 * x)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "sent"),
    [
        (16, torch.bfloat16, True),
        (SENT_BYTES[2], torch.float32, True),
        (SENT_BYTES[2] + 16, torch.bfloat16, False),
        (8 << 10, torch.float16, False),
        (24, torch.bfloat16, False),
    ],
)
def test_small_messages_are_sent_where_ranks_have_inboxes(memory, monkeypatch, nbytes, dtype, sent):
    memory.inboxes, calls = torch.ones(2).long(), []

    def peer_sum(x, inboxes, *how):
        calls.append(inboxes)
        return 2 * x

    monkeypatch.setattr(all_reduce.kernels, "peer_sum", peer_sum, raising=False)  # not there without Triton
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
    assert torch.equal(memory.sum(x), 2 * x)
    assert calls == [memory.inboxes] * sent


def test_a_sum_keeps_the_shape_of_a_message_that_is_not_contiguous(memory):
    x = torch.arange(32.0).view(4, 8).T
    assert torch.equal(memory.sum(x), 2 * x)
    assert memory.operators.called == "one shot"


def test_sums_that_differ_from_the_process_group_are_refused(memory, monkeypatch):
    memory.check_sums(0)
    monkeypatch.setattr(all_reduce, "collective_sum", lambda x, group_name: 3 * x)
    with pytest.raises(all_reduce.UnsupportedError, match="a sum of 16 bytes"):
        memory.check_sums(0)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (PLACES[:1] * 2, "do not see all GPUs"),
        ([PLACES[0], ("other", "cuda", 1, True)], "several hosts"),
        ([PLACES[0], ("host", "cpu", None, False)], "NVIDIA GPU"),
        ([("host", "cuda", index, True) for index in range(3)], "2, 4, 8 ranks, not 3"),
        ([PLACES[0], ("host", "cuda", 7, True)], "GPU 0 cannot read the memory of GPU 7"),
    ],
)
def test_the_process_group_sums_where_memory_cannot_be_read(monkeypatch, places, says):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other < 2)
    with pytest.raises(all_reduce.UnsupportedError, match=says):
        all_reduce.check_places(places, 0)
    all_reduce.check_places(PLACES, 0)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failure_of_any_rank_lets_the_process_group_sum_on_all(monkeypatch, caplog, failed):
    """One rank cannot allocate: none tries to connect, as it would wait for that one."""
    stages, connected = iter(range(9)), []

    def exchange(values, value, group):
        values[:] = [value, value]
        if next(stages) == 2:  # the places and the check of them come first
            values[failed] = "no memory"

    def allocate(memory, device):
        memory.buffer = torch.empty(MAX_BYTES, dtype=torch.uint8)

    monkeypatch.setattr(all_reduce.dist, "all_gather_object", exchange)
    monkeypatch.setattr(all_reduce.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(all_reduce, "check_places", lambda places, rank: None)
    monkeypatch.setattr(PeerMemory, "allocate", allocate)
    monkeypatch.setattr(PeerMemory, "connect", lambda memory: connected.append(memory))
    assert not open_peer_memory(0, SimpleNamespace(group_name="pair"), None)
    assert not connected
    assert "pair" not in PEER_MEMORIES


@pytest.mark.slow
@pytest.mark.parametrize("size", [2])
def test_sums_of_ranks_on_cpus_equal_the_process_groups(size):
    ended = run_on_ranks(size, "helpers.sums_on_ranks", module=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_by_peer_memory_equal_nccls_and_are_captured():
    ended = run_on_ranks(2, "helpers.sums_on_ranks", module=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("captured sums are equal") == 2
    assert ended.stdout.count("continuations are equal") == 2
