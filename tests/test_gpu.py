"""On a GPU: captured steps give the same tokens, for every architecture, and neither wait nor allocate."""

import warnings

import pytest
import torch

from conftest import ARCHITECTURES, tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter import Engine, ReDrafter
from redrafter.options import EngineOptions
from redrafter.target import Target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW = 20
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
PROCESSED = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
NOT_CAPTURED = {"deepseek_v3", "gpt_oss", "qwen3_moe"}  # each with a warning that says why


def on_gpu(architecture: str, **options: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture).cuda(), tiny_drafter().cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, **options)
    return engine


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = uneven_batch()
    return ids.cuda(), mask.cuda()


def check(engine: Engine) -> None:
    ids, mask = batch()
    expected = engine.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for arguments in ({"do_sample": False}, SAMPLING, PROCESSED):
        out = [engine.generate(ids, mask, max_new_tokens=NEW, speculate=s, **arguments) for s in (True, False, True)]
        assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
        if not arguments["do_sample"]:
            assert torch.equal(out[0], expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_steps_write_what_model_generate_writes(architecture):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(on_gpu(architecture, compile=False))
    told = [str(each.message) for each in said if "slower" in str(each.message)]
    assert len(told) == (1 if architecture in NOT_CAPTURED else 0), told


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_compiled_steps_write_what_model_generate_writes(architecture):
    check(on_gpu(architecture, compile=True))


def test_a_step_neither_waits_nor_allocates():
    engine = on_gpu("llama", compile=False)
    ids, mask = batch()
    engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    [step] = [each for each in engine._graphs._kept.values() if len(each.state.length) == 4]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_target_knows_whether_it_can_be_packed():
    target = Target(tiny_model("llama").cuda())
    assert target.unpacked is None
    assert Target(tiny_model("llama")).unpacked == "it is not on a GPU"
