"""A drafter's head in 8 bits, which a CPU drafts with."""

import pytest
import torch
from torch import nn

from helpers.generation import same_undrafted
from helpers.models import DRAFTER_ALONE, tiny_drafter, uneven_batch
from redrafter import ReDrafter
from redrafter.drafting import int8_head
from redrafter.drafting.int8_head import Int8Head
from redrafter.model.target import Target


@pytest.fixture
def rounding(monkeypatch) -> None:
    """Let heads of tests be large enough, on any CPU."""
    monkeypatch.setattr(int8_head, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ids", "width"), [(97, 33), (1000, 64)])
def test_a_rounded_head_scores_nearly_as_the_head_does(rounding, ids, width, dtype):
    torch.manual_seed(0)
    head, x = nn.Linear(width, ids, bias=False, dtype=dtype), torch.randn(2, 3, width, dtype=dtype)
    rounded = Int8Head.from_linear(head)
    with torch.no_grad():
        exact = (x.float() @ head.weight.float().T).detach()
    found = rounded(x)
    assert found.shape == (2, 3, ids)
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.02 * exact.norm()
    assert rounded(torch.zeros(1, 1, width)).abs().max() == 0


def test_small_heads_and_other_devices_keep_theirs(monkeypatch):
    assert Int8Head.from_linear(nn.Linear(64, 64, bias=False)) is None
    monkeypatch.setattr(int8_head, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert Int8Head.from_linear(nn.Linear(64, 64, bias=False)) is None
    assert Int8Head.from_linear(None) is None


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("beams", [1, 3])
def test_drafts_of_a_rounded_head_change_no_token(rounding, llama, beams, how):
    drafter = tiny_drafter(draft_beams=beams, draft_len_per_beam=3)
    read = drafter.draft_bytes(3)
    engine = ReDrafter(Target(llama), drafter, options=DRAFTER_ALONE)
    assert drafter.int8_head is not None
    assert drafter.draft_bytes(3) < read
    ids, mask = uneven_batch(3)
    same_undrafted(engine, ids, mask, max_new_tokens=30, eos_token_id=None, **how)
    drafter.train()
    assert drafter.int8_head is None, "training changes the head"


def test_another_drafter_brings_its_own_rounded_head(rounding, llama):
    engine = ReDrafter(Target(llama), tiny_drafter())
    first = engine.drafter.int8_head
    engine.change_drafter(tiny_drafter())
    assert engine.drafter.int8_head is not first
