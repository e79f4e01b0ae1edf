"""Fused attention of the blocks at all positions of given sequences equals the attention with scores in memory."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from helpers.dflash import random_block_drafter
from helpers.models import assert_close_by_scale, tiny_model
from helpers.training import known_text
from redrafter.drafting import anchor_attention, block_drafter
from redrafter.drafting.anchor_attention import SeenRanges
from redrafter.drafting.block_drafter import BlockDrafter
from redrafter.model.teacher import Teacher
from redrafter.train.config import TrainConfig
from redrafter.train.loss import Unroll

DEPTH, LENGTH = 3, 22
DRAFTERS = {
    "DFlash": {},
    "DSpark": {"markov_rank": 6, "causal": "sliding", "sliding_layers": [1]},
    "DFlash2": {"conv_kernel_size": 2, "conv_group_size": 4},
    "causal": {"causal": "all"},
    "narrower than a block": {"sliding_layers": [1], "sliding_window": 2},
}


def learnt(drafter: BlockDrafter, model: torch.nn.Module, packed: bool, device: str = "cpu") -> list[Tensor]:
    """Return the loss of two rows, and the gradients of all weights."""
    tokens = torch.cat([known_text(drafter, LENGTH), known_text(drafter, LENGTH, seed=1)]).to(device)
    drafter, model = deepcopy(drafter).to(device), deepcopy(model).to(device)
    segment = torch.tensor([[0] * 9 + [1] * 8 + [2] * 5, [0] + [1] * 21], device=device) if packed else None
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with Teacher(model, drafter.config.target_layers) as teacher:
        output = teacher.read_batch(tokens, segment)
    unroll = Unroll(drafter, TrainConfig(draft_len=DEPTH)).to(device)
    loss = unroll(tokens, mask, output, segment).loss
    loss.backward()
    return [loss.detach().cpu(), *(weight.grad.cpu() for weight in drafter.parameters() if weight.grad is not None)]


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, enable_gqa: bool, kernel_options: object
) -> Tensor:
    """Compute FlexAttention with gradients, which it lacks on a CPU."""
    row, q, k = (torch.arange(size) for size in (len(query), query.shape[2], key.shape[2]))
    seen = block_mask.mask_mod(row[:, None, None, None], torch.tensor(0), q[:, None], k)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=enable_gqa)


@pytest.fixture
def fused(monkeypatch):
    """Make a CPU take the path of a GPU."""
    monkeypatch.setattr(block_drafter, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(anchor_attention, "compiled_attention", lambda: attend_densely)
    monkeypatch.setattr(anchor_attention, "TRIED", {})


@pytest.mark.parametrize("packed", [False, True], ids=["one text in float32", "packed in float64"])
@pytest.mark.parametrize("form", DRAFTERS)
def test_fused_attention_learns_what_the_reference_learns(form, packed, fused, monkeypatch):
    drafter, model = (
        random_block_drafter(**DRAFTERS[form]).to(torch.float64 if packed else torch.float32),
        tiny_model("llama"),
    )
    # Small parts, of which the last is filled up.
    monkeypatch.setattr(block_drafter, "SCORES_AT_ONCE", 1 << 11)
    found = learnt(drafter, model, packed)
    assert all(anchor_attention.TRIED.values())
    assert anchor_attention.TRIED
    monkeypatch.setattr(block_drafter, "FUSED_ON", ())
    for one, other in zip(found, learnt(drafter, model, packed), strict=True):
        assert_close_by_scale(one, other, 1e-6 if packed else 1e-5)


@pytest.mark.parametrize("sees_later", [False, True])
@pytest.mark.parametrize("window", [None, 2, 7, 40])
def test_tiles_of_a_mask_hold_all_that_is_seen(window, sees_later, monkeypatch):
    monkeypatch.setattr(anchor_attention, "TILE", 8)
    length, size, columns = 61, 5, torch.arange(10, 61).clamp(max=57)
    starts = torch.where(torch.arange(length) < 30, 1, 31).expand(2, -1).clone()
    starts[1] = 0
    ranges = SeenRanges.of_blocks(columns, starts[:, columns], length, size, window, sees_later=sees_later)
    mask, queries = ranges.mask(), len(columns) * size
    query, key = torch.arange(queries), torch.arange(length + queries)
    position = columns[query // size] + 1 + query % size
    of = torch.cat([torch.arange(length), position])  # position of each key
    committed = (
        (key < length) & (key <= columns[query // size, None]) & (key >= starts[:, columns[query // size], None])
    )
    own = (key >= length) & ((key - length) // size == (query // size)[:, None])
    seen = (committed | own) & (sees_later | (of <= position[:, None]))
    if window is not None:
        seen = seen & (of > position[:, None] - window)
    for row in range(2):
        assert torch.equal(mask.mask_mod(torch.tensor(row), torch.tensor(0), query[:, None], key), seen[row])
        for number, counts, listed in (
            (0, mask.kv_num_blocks, mask.kv_indices),
            (1, mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            for tile, (count, indices) in enumerate(zip(counts[row, 0], listed[row, 0], strict=True)):
                for other in indices[:count]:
                    part = slice(tile * 8, tile * 8 + 8), slice(other * 8, other * 8 + 8)
                    if number:
                        assert seen[row][part].all()
                        assert seen[row][part].numel() == 64
                    seen[row][part] = False
        assert not seen[row].any()
    assert mask.full_kv_num_blocks.sum() > (0 if window is None else -1)


def test_where_flex_attention_cannot_be_compiled_one_warning_names_the_reason(fused, monkeypatch):
    def refuse() -> None:
        raise RuntimeError("no compiler here\nand more")

    drafter, model = random_block_drafter(), tiny_model("llama")
    monkeypatch.setattr(anchor_attention, "compiled_attention", refuse)
    with pytest.warns(UserWarning, match="cannot be compiled for it: no compiler here$") as warned:
        found = [learnt(drafter, model, packed=False) for _ in range(2)]
    assert len([each for each in warned if "FlexAttention" in str(each.message)]) == 1
    monkeypatch.setattr(block_drafter, "FUSED_ON", ())
    for one, *others in zip(learnt(drafter, model, packed=False), *found, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", DRAFTERS)
def test_a_gpu_that_fuses_attention_learns_what_a_cpu_learns(form, monkeypatch):
    drafter, model = random_block_drafter(**DRAFTERS[form], head_dim=16), tiny_model("llama")
    monkeypatch.setattr(anchor_attention, "TRIED", {})
    found = learnt(drafter, model, packed=True, device="cuda")
    assert all(anchor_attention.TRIED.values())
    assert anchor_attention.TRIED
    for one, other in zip(found, learnt(drafter, model, packed=True), strict=True):
        assert_close_by_scale(one, other, 1e-3)
