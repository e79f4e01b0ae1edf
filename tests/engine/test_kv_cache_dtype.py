"""Keys and values in FP8: drafts, pieces of prompts, preemption and reused prefixes change no text.

Most models here compute in float64, in which other shapes of products move no number to another one of FP8.
"""

import pytest
import torch

from helpers.models import CHUNKED, VOCAB, Scripted, paged, tiny_drafter, tiny_model, uneven_batch
from helpers.steps import read_prompts
from redrafter import ArgumentError, DraftTarget, Engine, PromptLookup, ReDrafter, UnsupportedError
from redrafter.app.loading import Pair
from redrafter.app.options import LoadOptions
from redrafter.cache import paged as paged_cache
from redrafter.cache.dense import stored_as
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.checkpoints.merged import TreeShape
from redrafter.engine.modes import use_kv_cache_dtype
from redrafter.engine.options import EngineOptions
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.target import Target

LIMITS = {"kv_cache_free_gpu_memory_fraction": 0.01, "max_seq_len": 96}
FP8 = EngineOptions(kv_cache_dtype="fp8", **LIMITS)
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "seed": 7}}
NEW = 16
FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def tiny_target(model_type="llama", dtype=torch.float64, **changes):
    return Target(tiny_model(model_type, **changes).to(dtype))


def engine_of(target, beams=5, depth=4, options=FP8, **drafter):
    return ReDrafter(target, tiny_drafter(**drafter).to(target.dtype), TreeShape(beams, depth, 999), options=options)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def write(engine, ids, mask, new=NEW, **arguments):
    """Return the texts `[B, L]` and the logits by step, `[B, new, V]`."""
    out = engine.generate(
        ids, mask, max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True, output_logits=True, **arguments
    )
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_drafts_change_no_text(target, name, setting):
    ids, mask = uneven_batch(rows=5)
    options = EngineOptions(kv_cache_dtype=name, **LIMITS)
    plain = write(engine_of(target, options=options), ids, mask, speculate=False, **SETTINGS[setting])
    for beams, depth in ((1, 5), (5, 5), (10, 3)):
        engine = engine_of(target, beams, depth, options)
        assert_same(write(engine, ids, mask, **SETTINGS[setting]), plain)
        assert engine.graphs.store.fp8 == FORMATS[name]


def test_accepted_drafts_change_no_text(target):
    ids, mask = uneven_batch(rows=1)
    plain = write(engine_of(target), ids, mask, 40, speculate=False, **SETTINGS["greedy"])
    engine = Engine(target, Scripted(plain[0], 3, 5), FP8)
    assert_same(write(engine, ids, mask, 40, **SETTINGS["greedy"]), plain)
    out = engine.generate(ids, mask, max_new_tokens=40, min_new_tokens=40, return_dict_in_generate=True)
    assert out.stats.tokens_per_step > 5


def test_the_cache_is_what_changes_the_text(target):
    """Guard the tests above: in FP8, other logits come out."""
    ids, mask = uneven_batch(rows=2)
    as_they_are = paged(engine_of(target, options=EngineOptions(**LIMITS)))
    first, second = (write(e, ids, mask, **SETTINGS["greedy"])[1][:, 1] for e in (as_they_are, engine_of(target)))
    difference = (first - second).abs().max() / first.abs().max()
    assert 1e-3 < difference < 0.3


@pytest.mark.parametrize("form", ["gemma3_text", "llama4_text", "lfm2"])
def test_layers_of_any_kind_write_the_same(form):
    """Windows, chunks of positions and convolutions."""
    ids, mask = uneven_batch(rows=3)
    engine = engine_of(tiny_target(form, **CHUNKED if form == "llama4_text" else {}))
    plain = write(engine, ids, mask, speculate=False, **SETTINGS["greedy"])
    assert_same(write(engine, ids, mask, **SETTINGS["greedy"]), plain)


@pytest.mark.parametrize("form", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_no_bit_changes_where_batches_are_invariant(form):
    """Soft caps and sinks, whose sums are in float32 otherwise, and latent keys, as attention receives them."""
    ids, mask = uneven_batch(rows=4)
    options = EngineOptions(kv_cache_dtype="fp8", batch_invariant=True, **LIMITS)
    engine = engine_of(tiny_target(form, torch.bfloat16), options=options)
    text, logits = write(engine, ids, mask, speculate=False, **SETTINGS["sampled"])
    drafted_text, drafted_logits = write(engine, ids, mask, **SETTINGS["sampled"])
    assert torch.equal(drafted_text, text)
    assert torch.equal(drafted_logits, logits)


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
    context = {"context_window": 12, "context_head_dim": 8}
    engine = engine_of(tiny_target(), **context)
    ids, mask = uneven_batch(rows=3)
    plain = write(engine, ids, mask, 30, speculate=False, **SETTINGS["sampled"])
    assert_same(write(engine, ids, mask, 30, **SETTINGS["sampled"]), plain)
    dtypes = [keys.dtype for keys, *_ in engine.graphs.store.layer_pools]
    assert dtypes == [torch.float8_e4m3fn] * 3 + [torch.float64]


def test_all_engines_take_it_as_an_argument():
    ids, mask = uneven_batch(rows=3)
    model, use = tiny_model("llama").double(), {"kv_cache_dtype": "fp8", **LIMITS}
    draft = tiny_model("qwen2", num_hidden_layers=1).double()
    engines = [
        PromptLookup.from_pretrained(model, **use),
        DraftTarget.from_pretrained(model, draft, draft_len=3, num_beams=2, **use),
        ReDrafter.from_pretrained(model, tiny_drafter().double(), **use),
    ]
    texts = [write(engine, ids, mask, **SETTINGS["sampled"]) for engine in engines]
    for text in texts[1:]:
        assert_same(text, texts[0])
    assert all(engine.graphs.store.fp8 for engine in engines)
    assert engines[1].graphs.draft_store.fp8 == torch.float8_e4m3fn


@pytest.mark.parametrize(("name", "times"), [("auto", 1), ("fp8", 2), ("fp8_e5m2", 2)])
def test_a_bfloat16_cache_holds_half_as_many_tokens(monkeypatch, name, times):
    target = tiny_target(dtype=torch.bfloat16)
    block = KVCachePool.block_bytes(target.paged_shapes)
    monkeypatch.setattr(paged_cache, "_free_memory", lambda *_: 50 * block)
    options = EngineOptions(kv_cache_dtype=name, kv_cache_free_gpu_memory_fraction=1.0)
    graphs = engine_of(target, options=options).make_graphs(rows=100)
    assert graphs.store.num_blocks == times * 50
    assert sum(pool.nbytes for pool in graphs.store.pools) == 50 * block
    assert graphs.store.pools[0].shape[1] == times * 50 * BLOCK_SIZE


@pytest.mark.parametrize("name", ["int8", "FP8", "", None, 8])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ArgumentError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got"):
        EngineOptions(kv_cache_dtype=name)


def test_a_model_without_a_paged_cache_is_refused():
    target = Target(tiny_model("bloom"))
    refused = r"needs the paged cache, and Bloom\w+ has none: .*--kv-cache-dtype auto"
    with pytest.raises(UnsupportedError, match=refused):
        Engine(target, Scripted(torch.zeros(1, 9).long(), 1, 1), FP8)


def test_a_draft_model_on_another_device_is_refused(target, monkeypatch):
    draft = tiny_target("qwen2", num_hidden_layers=1)
    monkeypatch.setattr(draft, "device", torch.device("meta"))
    with pytest.raises(UnsupportedError, match="the draft model is on meta"):
        DraftTarget(target, draft, options=FP8)


@pytest.mark.parametrize(
    ("name", "capability", "fits"), [("fp8", (8, 0), False), ("fp8", (8, 9), True), ("fp8_e5m2", (8, 0), True)]
)
def test_an_older_gpu_has_e5m2_alone(monkeypatch, name, capability, fits):
    target = tiny_target(dtype=torch.float32)
    _ = target.paged
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if fits:
        use_kv_cache_dtype(target, None, name)
    else:
        with pytest.raises(UnsupportedError, match=r"this one has 8\.0: take 'fp8_e5m2'"):
            use_kv_cache_dtype(target, None, name)


def test_a_flag_sets_it():
    options = LoadOptions(kv_cache_dtype="fp8", tuning="none", max_seq_len=64, kv_cache_free_gpu_memory_fraction=0.01)
    assert Pair.load(options).engine.make_graphs(rows=1).store.fp8 == torch.float8_e4m3fn
