"""What ranks tell each other, with messages that the test stands in for."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from helpers.processes import soon
from redrafter import MismatchError
from redrafter.parallel import ranks as module
from redrafter.parallel.ranks import Ranks

TWO = Ranks(rank=0, size=2, group=SimpleNamespace(group_name="two"))


@pytest.fixture
def echo(monkeypatch):
    """Let every broadcast bring what this rank has sent."""
    operators = SimpleNamespace(broadcast=lambda x, source, group: x.clone(), wait_tensor=lambda x: x)
    monkeypatch.setattr(module, "_OPS", operators)


def test_tensors_of_several_dtypes_travel_in_one_message(echo):
    sent = [torch.tensor([[True, False, True]]), torch.arange(6).view(2, 3), torch.randn(3, 1), torch.arange(4)[::2]]
    for x, received in zip(sent, TWO.of_first(*sent), strict=True):
        torch.testing.assert_close(received, x, rtol=0, atol=0)


@pytest.fixture
def other_says(monkeypatch):
    """Return a function that sets what the other rank has, where ranks compare what they have."""

    def answer(other: object) -> None:
        def gather(values: list, value: object, group: object) -> None:
            values[:] = [value, other]

        monkeypatch.setattr(module.dist, "all_gather_object", gather)

    return answer


def test_ranks_that_agree_go_on(other_says):
    other_says("paged")
    TWO.check_equal("paged", "the cache")


def test_ranks_that_differ_are_refused(other_says):
    other_says("dense")
    with pytest.raises(MismatchError, match=r"the cache of rank 1 is 'dense', and of rank 0 'paged'"):
        TWO.check_equal("paged", "the cache")


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
