"""A drafter's head in 8 bits, which a CPU drafts with."""

import pytest
import torch
from torch import nn

from helpers.generation import same_undrafted
from helpers.models import DRAFTER_ALONE, tiny_drafter, uneven_batch
from redrafter import ReDrafter
from redrafter.drafting import drafter_model
from redrafter.drafting.drafter_model import round_head
from redrafter.kernels.grouped_linear import is_fast
from redrafter.model.target import Target

pytestmark = pytest.mark.skipif(not is_fast("cpu"), reason="needs a C compiler")


@pytest.fixture
def rounding(monkeypatch) -> None:
    """Let heads of tests be large enough."""
    monkeypatch.setattr(drafter_model, "MIN_ROUNDED_WEIGHTS", 1)


def test_only_a_large_head_in_whole_groups_on_a_cpu_is_rounded(monkeypatch):
    assert round_head(nn.Linear(64, 64, bias=False)) is None, "small"
    monkeypatch.setattr(drafter_model, "MIN_ROUNDED_WEIGHTS", 1)
    assert round_head(nn.Linear(64, 64, bias=False)) is not None
    assert round_head(nn.Linear(33, 64, bias=False)) is None
    assert round_head(nn.Linear(64, 64)) is None
    assert round_head(None) is None
    monkeypatch.setattr(drafter_model, "is_fast", lambda device: False)
    assert round_head(nn.Linear(64, 64, bias=False)) is None, "no kernel"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_head_scores_nearly_as_the_head_does(rounding, llama, dtype):
    torch.manual_seed(0)
    drafter = tiny_drafter().to(dtype).eval()
    x = torch.randn(2, 3, drafter.lm_head.in_features, dtype=dtype)
    with torch.no_grad():
        exact = x.float() @ drafter.lm_head.weight.float().T
        drafter.prepare(Target(llama))
        found = drafter.score(x)
    assert drafter.int8_head is not None
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 0.01 * exact.norm()
    many = x.repeat(drafter_model.MAX_ROUNDED_INPUTS, 1, 1)
    assert drafter.score(many).dtype == dtype, "many inputs read the head as it is"


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
