"""On a GPU: copies from and to the host beside the work of another stream, and the texts of what was copied back."""

import pytest
import torch

from helpers.models import VOCAB, paged, tiny_drafter, tiny_model, with_tree
from redrafter import DraftTarget, Engine
from redrafter.cache import host_blocks as module
from redrafter.cache.block_manager import BlockCopy
from redrafter.cache.host_blocks import HostBlocks
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCKS = 200


@pytest.mark.parametrize("staged_blocks", [7, 1000])
def test_copies_are_ordered_with_what_computes(staged_blocks: int, monkeypatch: pytest.MonkeyPatch):
    shape = LayerShape(8, 64, 64, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(module, "STAGING_BYTES", staged_blocks * KVCachePool.block_bytes([shape] * 4))
    store = KVCachePool([shape] * 4, BLOCKS)
    host, (pool,) = HostBlocks([store], BLOCKS), store.pools
    numbers = torch.arange(BLOCKS, device="cuda").repeat_interleave(BLOCK_SIZE)[:, None, None].to(pool.dtype)
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):  # what follows is launched long before any of it runs
        busy = busy @ busy / 4096
    pool.copy_(numbers.expand_as(pool))
    for _ in range(5):
        host.copy([BlockCopy(True, block, block) for block in range(1, BLOCKS)])
        pool.zero_()
        host.copy([BlockCopy(False, BLOCKS - block, block) for block in range(1, BLOCKS)])
        expected = numbers.unflatten(0, (BLOCKS, BLOCK_SIZE))[1:].flip(0).flatten(0, 1)
        assert torch.equal(pool[:, BLOCK_SIZE:], expected.expand_as(pool[:, BLOCK_SIZE:]))
        numbers = torch.cat([numbers[:BLOCK_SIZE], expected])


def drafter() -> Engine:
    return with_tree(tiny_model("llama").cuda(), tiny_drafter().cuda(), 3, 3)


def context_drafter() -> Engine:
    form = tiny_drafter(recurrence="gated", target_layers=(0, 1), context_window=12, context_head_dim=8)
    return with_tree(tiny_model("llama").cuda(), form.cuda(), 4, 3)


def draft_model() -> Engine:
    return DraftTarget(Target(tiny_model("llama").cuda()), Target(tiny_model("llama").cuda()), draft_len=3)


@pytest.mark.parametrize("make", [drafter, context_drafter, draft_model])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_captured_steps_go_on_behind_what_was_copied_back(make, sampling: dict):
    prompts = [torch.randint(3, VOCAB, (1, 50), device="cuda") for _ in range(5)]
    arguments = {"max_new_tokens": 12, "eos_token_id": None} | sampling
    plain = make()
    plain.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, compile=False)
    expected = [plain.generate(prompt, speculate=False, **arguments) for prompt in prompts]
    engine = paged(make(), blocks=14, host_blocks=60)
    found = [engine.generate(prompt, **arguments) for prompt in (*prompts, *prompts)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 2, strict=True))
    assert engine.memory.blocks.onboarded >= 5 * 2
