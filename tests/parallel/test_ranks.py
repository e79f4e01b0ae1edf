"""What ranks tell each other, and layers of which each has a part; the test stands in for the other ranks."""

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn

from helpers.processes import soon
from redrafter import MismatchError, UnsupportedError
from redrafter.drafting.head_part import MIN_SAVED_BYTES, HeadPart
from redrafter.model.quantized_layers import Float8Linear
from redrafter.parallel import ranks as module
from redrafter.parallel.local_shards import GatheredLinear, SummedLinear, own_heads
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.tree.beam_search import PartOfScores, top_continuations

TWO = Ranks(rank=0, size=2, group=SimpleNamespace(group_name="two"))


def test_tensors_of_several_dtypes_travel_in_one_message(monkeypatch):
    echo = SimpleNamespace(broadcast=lambda x, source, group: x.clone(), wait_tensor=lambda x: x)
    monkeypatch.setattr(module, "COLLECTIVES", echo)
    sent = [torch.tensor([[True, False, True]]), torch.arange(6).view(2, 3), torch.randn(3, 1), torch.arange(4)[::2]]
    for x, received in zip(sent, TWO.of_first(*sent), strict=True):
        torch.testing.assert_close(received, x, rtol=0, atol=0)


def test_ranks_that_agree_go_on_and_others_are_refused(monkeypatch):
    def gather(values: list, value: object, group: object) -> None:
        values[:] = [value, "paged"]

    monkeypatch.setattr(module.dist, "all_gather_object", gather)
    TWO.check_equal("paged", "the cache")
    with pytest.raises(MismatchError, match=r"the cache of rank 1 is 'paged', and of rank 0 'dense'"):
        TWO.check_equal("dense", "the cache")


def test_one_process_agrees_with_itself():
    assert (ALONE.from_first("a"), ALONE.minimum(3)) == ("a", 3)
    ALONE.check_equal("a", "it")


@pytest.mark.parametrize("reaped", [False, True])
def test_a_peer_that_has_ended_is_named(reaped):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = Ranks(rank=0, size=2, peers={1: psutil.Process(process.pid)})
    assert ranks.ended() == []
    process.kill()
    if reaped:
        process.wait()
    assert soon(lambda: ranks.ended() == [1])
    process.communicate()


@dataclass(frozen=True, eq=False)
class Apart(Ranks):
    """A rank that is told nothing by the others: it returns its own part."""

    def sum(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        return x

    def join_last(self, x: Tensor) -> Tensor:
        """Return this rank's part of what is joined."""
        return x


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_a_layer_make_the_layer(size):
    torch.manual_seed(0)
    layer, x = nn.Linear(10, 7).double(), torch.randn(3, 10, dtype=torch.double)
    for splits in (False, True):
        outputs = []
        for rank, (weight, own) in enumerate(zip(layer.weight.chunk(size, 1), x.chunk(size, 1), strict=True)):
            part = SummedLinear(layer, nn.Parameter(weight), None, Apart(rank, size), splits)
            outputs.append(part(x if splits else own))
        torch.testing.assert_close(sum(outputs) + layer.bias, layer(x))
    parts = [
        GatheredLinear(layer, nn.Parameter(weight), nn.Parameter(bias), Apart(rank, size))
        for rank, (weight, bias) in enumerate(zip(layer.weight.chunk(size), layer.bias.chunk(size), strict=True))
    ]
    torch.testing.assert_close(torch.cat([part(x) for part in parts], dim=-1)[..., :7], layer(x))


@pytest.mark.parametrize(("heads", "owned"), [(8, None), (2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])])
def test_ranks_share_key_heads_where_there_are_fewer(heads, owned):
    model, whole = nn.Module(), torch.randn(heads * 4, 3)
    for rank in range(4):
        model.attention = nn.Module()
        model.attention.head_dim, model.attention.num_key_value_groups = 4, 8 // heads
        part = SimpleNamespace(shape=whole.shape, to_local=lambda: "its shard", full_tensor=lambda: whole)
        rows = own_heads(model, "attention.k_proj", "weight", part, Ranks(rank, 4))
        if owned is None:
            assert rows == "its shard"
            continue
        assert torch.equal(rows, whole.view(heads, 4, 3)[owned[rank]])
        assert model.attention.num_key_value_groups == 2  # of 8 query heads, two on each rank


def test_key_heads_that_ranks_cannot_share_are_refused_by_name():
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.head_dim = 4
    part = SimpleNamespace(shape=(12, 3), to_local=lambda: None)
    with pytest.raises(UnsupportedError, match=r"attention\.v_proj has 3 heads, which 4 ranks cannot share"):
        own_heads(model, "attention.v_proj", "weight", part, Ranks(0, 4))


@dataclass(frozen=True, eq=False)
class Joined(Ranks):
    """A rank that receives what the test has kept of every rank, its own part included."""

    parts: tuple[Tensor, ...] = ()

    def join_last(self, x: Tensor) -> Tensor:
        """Return what all ranks send."""
        return torch.cat(self.parts, dim=-1)


@dataclass(frozen=True, eq=False)
class Keeping(Ranks):
    """A rank that keeps what it sends, and receives zeros."""

    sent: list[Tensor] = field(default_factory=list)

    def join_last(self, x: Tensor) -> Tensor:
        """Keep a part, and return as much as all ranks send."""
        self.sent.append(x)
        return torch.zeros_like(x).repeat_interleave(self.size, dim=-1)


@pytest.mark.parametrize(("count", "beams", "width"), [(41, 3, 5), (6, 1, 5), (300, 4, 1)])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_divide_a_head_choose_the_continuations_of_the_whole(count, beams, width, size):
    torch.manual_seed(0)
    head, x, total = nn.Linear(8, count, bias=False), torch.randn(2, beams, 8), torch.randn(2, beams)
    ids = torch.randperm(500)[:count]
    expected = top_continuations(head(x), total, width, ids)
    kept = Keeping(0, size)
    parts = [HeadPart.of_rank(head, ids, Ranks(rank, size)) for rank in range(size)]
    if count == 6 and size == 4:  # two ids for each of the first three ranks, and none for the last
        assert parts == [None] * 4
        return
    assert torch.equal(torch.cat([part.names for part in parts]), ids)
    for part in parts:
        PartOfScores(part.layer(x), part.first, count, kept).best(total, width, ids)
    for part in parts:
        joined = Joined(part.ranks.rank, size, parts=tuple(kept.sent))
        score, source, token = PartOfScores(part.layer(x), part.first, count, joined).best(total, width, ids)
        torch.testing.assert_close(score, expected[0])
        assert torch.equal(source, expected[1])
        assert torch.equal(token, expected[2])


def test_a_head_is_divided_only_where_that_saves_more_than_a_message(monkeypatch):
    head = nn.Linear(8, 40, bias=False)
    monkeypatch.setitem(MIN_SAVED_BYTES, "cpu", head.weight.nbytes // 2)
    assert HeadPart.of_rank(head, None, Ranks(1, 2)).first == 20
    assert HeadPart.of_rank(head, None, ALONE) is None
    monkeypatch.setitem(MIN_SAVED_BYTES, "cpu", head.weight.nbytes // 2 + 1)
    assert HeadPart.of_rank(head, None, Ranks(1, 2)) is None


def test_the_part_of_an_fp8_head_has_its_scales():
    head, x = Float8Linear(nn.Linear(16, 40, bias=False)), torch.randn(3, 16)
    parts = [HeadPart.of_rank(head, None, Ranks(rank, 2)).layer for rank in range(2)]
    assert torch.equal(torch.cat([part(x) for part in parts], dim=-1), head(x))
