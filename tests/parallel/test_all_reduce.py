"""Sums over ranks by peer memory: which kernel sums a message, and where the process group does."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from helpers.ranks import run_on_ranks
from redrafter.parallel import all_reduce
from redrafter.parallel.all_reduce import MAX_BYTES, PEER_MEMORIES, SENT_BYTES, PeerMemory, open_peer_memory
from redrafter.parallel.ranks import Ranks

PLACES = [("host", "cuda", index, True) for index in range(2)]


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """Let two equal ranks have inboxes, and return a list of the sums that are called."""
    called = list[str]()

    def stand_in(name: str):
        def add(x, *how):
            assert x.is_contiguous()
            called.append(name)
            return 2 * x

        return add

    sums = SimpleNamespace(**{name: stand_in(name) for name in ("peer_sum", "peer_sum_by_shares")})
    monkeypatch.setattr(all_reduce.kernels, "peer_sum", sums, raising=False)  # not there without Triton
    monkeypatch.setattr(all_reduce, "collective_sum", lambda x, group_name: 2 * x)
    monkeypatch.setitem(PEER_MEMORIES, "two", PeerMemory("two", 0, 2))
    return called


@pytest.mark.parametrize(
    ("nbytes", "dtype", "by"),
    [
        (4, torch.bfloat16, ["peer_sum"]),
        (SENT_BYTES[2], torch.float32, ["peer_sum"]),
        (SENT_BYTES[2] + 4, torch.bfloat16, ["peer_sum_by_shares"]),
        (MAX_BYTES, torch.bfloat16, ["peer_sum_by_shares"]),
        (MAX_BYTES + 4, torch.bfloat16, []),
        (8 << 10, torch.float16, []),
        (8 << 10, torch.float64, []),
        (6, torch.bfloat16, []),  # no whole number of words
        (0, torch.bfloat16, []),
    ],
)
def test_size_and_dtype_of_a_message_select_what_sums_it(called, nbytes, dtype, by):
    x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
    total = Ranks(0, 2, SimpleNamespace(group_name="two"), reads_peers=True).sum(x)
    assert called == by
    assert torch.equal(total, 2 * x)


def test_a_sum_keeps_the_shape_of_a_message_that_is_not_contiguous(called):
    x = torch.arange(32.0).view(4, 8).T
    assert torch.equal(PEER_MEMORIES["two"].sum(x), 2 * x)
    assert called == ["peer_sum"]


def test_sums_that_differ_from_the_process_group_are_refused(called, monkeypatch):
    PEER_MEMORIES["two"].check_sums()
    monkeypatch.setattr(all_reduce, "collective_sum", lambda x, group_name: 3 * x)
    with pytest.raises(all_reduce.UnsupportedError, match="a sum of 4 bytes"):
        PEER_MEMORIES["two"].check_sums()


class Launched:
    """Replaces an event after kernels that wait: it is done once something has arrived in the inboxes."""

    memory = torch.empty(0)

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether the kernels have ended."""
        return bool(self.memory.any())


@pytest.mark.parametrize("arrive", [True, False])
def test_kernels_that_wait_for_a_peer_for_ever_are_given_up_and_ended(called, monkeypatch, arrive):
    whole, shares = 64, 48
    monkeypatch.setattr(all_reduce.kernels.peer_sum, "inbox_bytes", lambda nbytes, size: whole, raising=False)
    memory = PEER_MEMORIES["two"]
    memory.memory = Launched.memory = torch.full((whole + shares,), int(arrive), dtype=torch.uint8)
    for name, stand_in in (("Event", Launched), ("Stream", object), ("stream", lambda stream: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(all_reduce, "PROBE_SECONDS", 0.05)
    with nullcontext() if arrive else pytest.raises(all_reduce.UnsupportedError, match=r"arrive .* within 0.05 s"):
        memory.probe()
    # The second kernel is loaded once the first one has ended, as loading may wait for it.
    assert called == ["peer_sum", "peer_sum_by_shares"][: 1 + arrive]
    if not arrive:  # the number of the first call, as the kernels of both kinds look for it
        assert (memory.memory[:whole].view(torch.int64) >> 32 == 1).all()
        assert (memory.memory[whole:].view(torch.int32) == 1).all()


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
    monkeypatch.setattr(all_reduce.kernels, "TRITON", True)
    with pytest.raises(all_reduce.UnsupportedError, match=says):
        all_reduce.check_places(places, 0)
    all_reduce.check_places(PLACES, 0)
    monkeypatch.setattr(all_reduce.kernels, "TRITON", False)
    with pytest.raises(all_reduce.UnsupportedError, match="Triton is not installed"):
        all_reduce.check_places(PLACES, 0)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failure_of_any_rank_lets_the_process_group_sum_on_all(monkeypatch, caplog, failed):
    """One rank cannot allocate: none tries to connect, as it would wait for that one."""
    stages, connected = iter(range(9)), []

    def exchange(values, value, group):
        values[:] = [value, value]
        if next(stages) == 2:  # the places and the check of them come first
            values[failed] = "no memory"

    monkeypatch.setattr(all_reduce.dist, "all_gather_object", exchange)
    monkeypatch.setattr(all_reduce.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(all_reduce, "check_places", lambda places, rank: None)
    monkeypatch.setattr(PeerMemory, "allocate", lambda memory, device: None)
    monkeypatch.setattr(PeerMemory, "connect", lambda memory: connected.append(memory))
    assert not open_peer_memory(0, SimpleNamespace(group_name="pair"), None)
    assert not connected
    assert "pair" not in PEER_MEMORIES


@pytest.mark.slow
@pytest.mark.parametrize("size", [2])
def test_ranks_select_the_same_sums_and_the_operator_returns_them(size):
    ended = run_on_ranks(size, "helpers.sums_on_ranks", module=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_by_peer_memory_equal_nccls_and_are_captured(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    ended = run_on_ranks(size, "helpers.sums_on_ranks", module=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("captured sums are equal") == size
    assert ended.stdout.count("continuations are equal") == size
