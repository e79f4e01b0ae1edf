"""Modes of engines: keys and values in FP8, and batch invariance in half precision.

Drafts, other rows and parts of prompts change no text, and where batches are invariant no bit of a logit. Most models
with FP8 compute in float64 here, in which other shapes of products move no number to another one of FP8.
"""

import weakref

import pytest
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from helpers.features import make_engine
from helpers.models import CHUNKED, VOCAB, Scripted, paged, tiny_drafter, tiny_model, uneven_batch
from helpers.scheduling import KINDS, make_sequence, run_as_alone, scheduler
from helpers.steps import read_prompts
from helpers.training import base_dir
from redrafter import ArgumentError, DraftTarget, Engine, ReDrafter, UnsupportedError
from redrafter.app.loading import Pair
from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.cache import paged as paged_cache
from redrafter.cache.kv_cache import stored_as
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.engine.modes import check_processors, make_batch_invariant, use_kv_cache_dtype
from redrafter.engine.options import EngineOptions
from redrafter.features import BATCH_INVARIANCE
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target
from redrafter.scheduler.captured_step import collection_paused
from redrafter.tree.sizes import TreeShape

LIMITS = {"kv_cache_free_gpu_memory_fraction": 0.01, "max_seq_len": 96}
FP8 = EngineOptions(kv_cache_dtype="fp8", **LIMITS)
INVARIANT = EngineOptions(batch_invariant=True, **LIMITS)
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "seed": 7}}
NEW = 8


def tiny_target(model_type="llama", dtype=torch.float64, **changes):
    return Target(tiny_model(model_type, **changes).to(dtype))


def engine_of(target, beams=5, depth=4, options=FP8, **drafter):
    return ReDrafter(target, tiny_drafter(**drafter).to(target.dtype), TreeShape(beams, depth, 999), options=options)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def write(engine, ids, mask, new=NEW, **arguments):
    """Return the texts `[B, L]` and the logits by step, `[B, new, V]`."""
    arguments |= {"max_new_tokens": new, "min_new_tokens": new, "return_dict_in_generate": True, "output_logits": True}
    out = engine.generate(ids, mask, **arguments)
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same(found, expected, atol=1e-5):
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=atol, rtol=0)


def drafts_change_nothing(engine, ids, mask, setting="greedy", new=NEW, atol=1e-5):
    plain = write(engine, ids, mask, new, speculate=False, **SETTINGS[setting])
    assert_same(write(engine, ids, mask, new, **SETTINGS[setting]), plain, atol)


@pytest.mark.parametrize("form", ["gemma3_text", "llama4_text", "lfm2"])
def test_layers_of_any_kind_write_the_same_in_fp8(form):
    """Windows, chunks of positions and convolutions."""
    engine = engine_of(tiny_target(form, **CHUNKED if form == "llama4_text" else {}))
    drafts_change_nothing(engine, *uneven_batch(rows=3))


@pytest.mark.parametrize("form", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_no_bit_changes_where_batches_are_invariant_in_fp8(form):
    """Soft caps and sinks, whose sums are in float32 otherwise, and latent keys, as attention receives them."""
    options = EngineOptions(kv_cache_dtype="fp8", batch_invariant=True, **LIMITS)
    engine = engine_of(tiny_target(form, torch.bfloat16), options=options)
    drafts_change_nothing(engine, *uneven_batch(rows=4), "sampled", atol=0)


@pytest.mark.parametrize("max_tokens", [1, 5, 16])
def test_prompts_in_pieces_are_read_as_whole_ones(target, max_tokens):
    prompts = (torch.arange(40)[None] * 7 + 3) % VOCAB
    length, table = torch.tensor([40]), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    shapes = stored_as(target.paged_shapes, torch.float8_e4m3fn)
    caches = [PagedCache(KVCachePool(shapes, 4), table) for _ in range(2)]
    with torch.inference_mode():
        whole, _ = read_prompts(target, prompts, length, caches[0])
        in_pieces, _ = read_prompts(target, prompts, length, caches[1], max_tokens=max_tokens)
    torch.testing.assert_close(in_pieces, whole, atol=1e-5, rtol=0)
    for pieces, at_once in zip(caches[1].pool.pools, caches[0].pool.pools, strict=True):
        assert torch.equal(pieces.float(), at_once.float())


def test_what_a_drafter_remembers_keeps_its_format():
    engine = engine_of(tiny_target(), context_window=12, context_head_dim=8)
    drafts_change_nothing(engine, *uneven_batch(rows=3), "sampled", new=30)
    dtypes = [keys.dtype for keys, *_ in engine.memory.store.layer_pools]
    assert dtypes == [torch.float8_e4m3fn] * 3 + [torch.float64]


def test_keys_and_values_of_a_draft_model_are_in_fp8_too():
    draft = tiny_model("qwen2", num_hidden_layers=1)
    engine = DraftTarget.from_pretrained(tiny_model("llama"), draft, kv_cache_dtype="fp8", **LIMITS)
    memory = engine.make_memory(rows=1)
    assert memory.store.fp8 == memory.draft_store.fp8 == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "stored", "times"),
    [
        ("auto", None, 1),
        ("fp8", torch.float8_e4m3fn, 2),
        ("fp8_e4m3", torch.float8_e4m3fn, 2),
        ("fp8_e5m2", torch.float8_e5m2, 2),
    ],
)
def test_a_bfloat16_cache_holds_half_as_many_tokens(monkeypatch, name, stored, times):
    target = tiny_target(dtype=torch.bfloat16)
    block = KVCachePool.block_bytes(target.paged_shapes)
    monkeypatch.setattr(paged_cache, "_free_memory", lambda *_: 50 * block)
    options = EngineOptions(kv_cache_dtype=name, kv_cache_free_gpu_memory_fraction=1.0)
    memory = engine_of(target, options=options).make_memory(rows=100)
    assert memory.store.fp8 == stored
    assert memory.store.num_blocks == times * 50
    assert sum(pool.nbytes for pool in memory.store.pools) == 50 * block
    assert memory.store.pools[0].shape[1] == times * 50 * BLOCK_SIZE


@pytest.mark.variant  # sequences of tests/matrix find their prefixes too
def test_a_prompt_of_which_most_is_in_the_cache_is_read_beside_a_whole_one():
    target = tiny_target("llama", torch.bfloat16)
    served = scheduler(engine_of(target, 3, 3, INVARIANT, context_window=12, context_head_dim=8), blocks=40)
    first, second = torch.randint(3, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3)).tolist()
    for prompts in ([first], [first, second]):
        run_as_alone(served, [make_sequence(prompt, 12, KINDS["sampled"]) for prompt in prompts])


def test_flags_set_the_modes(tmp_path):
    use = {"model": base_dir(tmp_path), "max_seq_len": 64, "kv_cache_free_gpu_memory_fraction": 0.01}
    draft = DraftOptions(prompt_lookup=True)
    assert BATCH_INVARIANCE in Pair.load(LoadOptions(batch_invariant=True, **use), draft).engine.target.features
    memory = Pair.load(LoadOptions(kv_cache_dtype="fp8", **use), draft).engine.make_memory(rows=1)
    assert memory.store.fp8 == torch.float8_e4m3fn


def test_a_model_without_a_paged_cache_is_refused():
    target = Target(tiny_model("bloom"))
    refused = r"needs the paged cache, and Bloom\w+ has none: .*--kv-cache-dtype auto"
    with pytest.raises(UnsupportedError, match=refused):
        Engine(target, Scripted(torch.zeros(1, 9).long(), 1, 1), FP8)


@pytest.mark.parametrize(
    ("name", "capability", "fits"), [("fp8", (8, 0), False), ("fp8", (8, 9), True), ("fp8_e5m2", (8, 0), True)]
)
def test_an_older_gpu_has_e5m2_alone(monkeypatch, name, capability, fits):
    target = tiny_target(dtype=torch.float32)
    _ = target.paged
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        use_kv_cache_dtype(target, None, EngineOptions(kv_cache_dtype=name))
    else:
        with pytest.raises(UnsupportedError, match=r"this one has 8\.0: take 'fp8_e5m2'"):
            use_kv_cache_dtype(target, None, EngineOptions(kv_cache_dtype=name))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_needs_a_forward_that_is_compiled_for_the_mode(monkeypatch, compiled):
    engine = make_engine("undrafted")
    bound = paged(engine).target if compiled else engine.target
    monkeypatch.setattr(bound, "device", torch.device("cuda"))
    error, says = (ArgumentError, "load the model again") if compiled else (UnsupportedError, "leave out compile=False")
    with pytest.raises(error, match=says):
        make_batch_invariant(bound, None, compile=compiled)


def test_processors_that_sum_by_rows_are_refused_on_a_gpu(monkeypatch):
    engine = engine_of(tiny_target("llama", torch.bfloat16), options=INVARIANT)
    engine.generate(*uneven_batch(rows=1), max_new_tokens=2, do_sample=True, typical_p=0.9)
    monkeypatch.setattr(engine.target, "device", torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="typical_p and batch_invariant=True exclude each other: it sums"):
        check_processors(engine.target, [TypicalLogitsWarper(0.9)])


def test_memory_of_an_engine_that_is_gone_is_free_for_the_next_one():
    target = paged(engine_of(tiny_target())).target
    with collection_paused():
        gone = [engine_of(target)]
        gone[0].generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
        [old] = map(weakref.ref, target.shared.memories)
        gone.append(gone)  # a cycle, as the frames of a traceback may make
        del gone
        assert old() is not None
        engine_of(target).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
        assert old() is None
