"""LoRA adapters in captured and compiled steps on a GPU."""

import warnings

import pytest
import torch

from helpers.adapters import saved
from helpers.models import tiny_drafter, tiny_model, uneven_batch, with_tree
from redrafter.engine.options import EngineOptions
from redrafter.engine.redrafter import ReDrafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = {"max_new_tokens": 20, "do_sample": False}
MIXED = ["one", None, "two", "one"]


def on_gpu(architecture: str, **options: object) -> ReDrafter:
    engine = with_tree(tiny_model(architecture).cuda(), tiny_drafter().cuda(), 5, 5)
    engine.options = EngineOptions(kv_cache_free_gpu_memory_fraction=0.1, **options)
    return engine


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def adapters(request, tmp_path_factory):
    """The architecture, PEFT's models with three adapters by name, and their directories."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = {"one": {}, "two": {"r": 8, "target_modules": ["o_proj", "down_proj"]}, "three": {"use_rslora": True}}
    made = {name: saved(folder / name, request.param, seed, **more) for seed, (name, more) in enumerate(kinds.items())}
    return request.param, made


def check(engine, architecture, made, names):
    ids, mask = (x.cuda() for x in uneven_batch())
    found = engine.generate(ids, mask, adapter=names, **GREEDY)
    assert torch.equal(engine.generate(ids, mask, adapter=names, speculate=False, **GREEDY), found)
    sampled = {"max_new_tokens": 20, "do_sample": True, "seed": 3, "adapter": names}
    assert torch.equal(engine.generate(ids, mask, **sampled), engine.generate(ids, mask, speculate=False, **sampled))
    for row, name in enumerate(names):
        model = (tiny_model(architecture) if name is None else made[name][0]).cuda()
        expected = model.generate(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1], **GREEDY)[0]
        assert torch.equal(found[row, : len(expected)], expected), name


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
def test_rows_with_several_adapters_write_what_each_model_writes(adapters, compile):
    architecture, made = adapters
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*slower", UserWarning)  # steps that are not captured say so
        engine = on_gpu(architecture, compile=compile)
        engine.load_adapter("one", made["one"][1])
        check(engine, architecture, made, ["one", None, "one", "one"])
        engine.load_adapter("two", made["two"][1])  # which changes other layers
        check(engine, architecture, made, MIXED)
        check(engine, architecture, made, [None] * 4)


@pytest.mark.parametrize("compile", [False, True], ids=["captured", "compiled"])
def test_a_captured_step_survives_a_change_of_adapters(adapters, compile):
    architecture, made = adapters
    engine = on_gpu(architecture, compile=compile, max_loras=2)
    engine.load_adapter("one", made["one"][1])
    engine.load_adapter("two", made["two"][1])
    check(engine, architecture, made, MIXED)
    steps = [set(batch.captured_steps) for batch in engine.batches.idle]
    engine.unload_adapter("one")
    engine.load_adapter("three", made["three"][1])
    check(engine, architecture, made, ["three", None, "two", "three"])
    assert [set(batch.captured_steps) for batch in engine.batches.idle] == steps
