"""Kernels of attention are compiled in threads for the sizes of later steps, while a forward is compiled."""

import gc
import threading
from itertools import product

import pytest

from helpers.eagle import random_head
from helpers.models import check_texts, new_pool, paged, tiny_model, with_tree
from redrafter import PromptLookup
from redrafter.attention.tree_attention import tree_attention
from redrafter.cache.paged import PagedCache
from redrafter.drafting import eagle
from redrafter.engine.step_timing import ROWS, TOKENS
from redrafter.kernels.attention_inputs import TOKENS_PER_CHUNK, AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.scheduler import attention_kernels
from redrafter.scheduler.attention_kernels import DRAFT_ROWS, SIZES, TABLE_BLOCKS, StepSize
from redrafter.scheduler.paged_memory import prepare
from redrafter.scheduler.prefill import ROOMS_OF_MANY

FEW = (StepSize(1, 1, chunks=2), StepSize(3, 4))


@pytest.fixture
def attended(monkeypatch):
    """Every call of attention, of which thread; what stands for the kernels on a CPU is no operator."""
    monkeypatch.setattr("redrafter.attention.tree_attention._operator", lambda plan, device: tree_attention)
    monkeypatch.setattr(attention_kernels, "SIZES", FEW)
    calls, gather = [], AttentionInputs.from_arguments.__func__

    def noted(cls, *args, **settings):
        inputs = gather(cls, *args, **settings)
        calls.append((threading.current_thread() is threading.main_thread(), inputs))
        return inputs

    monkeypatch.setattr(AttentionInputs, "from_arguments", classmethod(noted))
    return calls


def test_each_kind_of_layer_attends_at_each_size_in_other_threads(attended):
    engine = paged(PromptLookup.from_pretrained(tiny_model("gemma2", num_hidden_layers=4)))
    of_threads = [inputs for main, inputs in attended if not main]
    windows = {inputs.window for main, inputs in attended if main}
    assert len(windows) == 2, "every second layer has a window"
    sizes = [(len(x.query), *(x.rows.sizes[i] for i in (0, 2, 3)), x.window) for x in of_threads]
    assert sorted(sizes) == sorted((*at, window) for at, window in product([(40, 1, 1, 2), (16, 3, 4, 0)], windows))
    # What they store is in the block that no sequence owns.
    for keys, values in (stores[:2] for stores in engine.memory.store.stores):
        assert not keys[BLOCK_SIZE:].any()
        assert not values[BLOCK_SIZE:].any()
    check_texts(engine)


def test_drafts_attend_with_few_rows_and_many_in_other_threads(attended, monkeypatch):
    monkeypatch.setattr(eagle, "reads_pages", lambda cache: isinstance(cache, PagedCache))
    monkeypatch.setattr(attention_kernels, "SIZES", ())
    engine = with_tree(tiny_model("llama"), random_head(), 10, 4)
    store = new_pool(engine, engine.target, 20)
    attended.clear()
    prepare(engine.target, store, compile=False, search=engine.proposer)
    of_threads = [inputs for main, inputs in attended if not main]
    assert {inputs.first for inputs in of_threads} == {1}, "entries of a head begin with the second token"
    found = sorted(
        (x.rows.sizes[0], x.rows.sizes[2] * x.heads[1], x.rows.sizes[1] > x.rows.sizes[2]) for x in of_threads
    )
    # Up to 16 queries of a key head are one tile: those of one beam, and of the five that steps choose at most.
    assert [(rows, queries > 16, cached) for rows, queries, cached in found] == [
        (rows, *kind) for rows in DRAFT_ROWS for kind in ((False, False), (False, True), (True, True))
    ]
    assert not any(pool[BLOCK_SIZE:].any() for layer in store.stores for pool in layer[:2])
    monkeypatch.undo()
    check_texts(engine)


def test_a_kernel_that_cannot_be_compiled_is_reported_and_stops_no_start(attended, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("out of shared memory\nand more")

    monkeypatch.setattr(attention_kernels, "chain", refuse)
    check_texts(paged(PromptLookup.from_pretrained(tiny_model("llama"))))
    assert [record.message for record in caplog.records if record.name == attention_kernels.__name__] == [
        "an attention kernel cannot be compiled: out of shared memory"
    ]


@pytest.mark.parametrize(("heads", "group"), [(8, 4), (8, 1), (32, 1), (8, 8), (4, 7), (3, 3), (2, 8), (16, 2), (4, 4)])
def test_the_sizes_have_the_variants_of_all_steps_of_a_start(heads, group):
    attention = pytest.importorskip("redrafter.kernels.attention")

    def variants(sizes, blocks):
        found = set()
        for rows, nodes, chunks in sizes:
            tiling = attention.choose_tiling(rows * heads, nodes * group, blocks, 128, True, False)
            found.add((*tiling[:2], *tiling[3:5], tiling.splits > 1, "tree"))
            if chunks:
                tiling = attention.choose_tiling(heads, chunks * TOKENS_PER_CHUNK * group, blocks, 128, True, False)
                found.add((*tiling[:2], *tiling[3:5], False, "chunk"))
        return found

    timed = [StepSize(rows, 1) for rows in TOKENS] + [StepSize(*each) for each in product(ROWS, (2, 3))]
    warmed_up = [StepSize(*each) for each in product((1, 2, 4, 8, 16, 32, 64), (1, 6, 16, 26), (0, *ROOMS_OF_MANY))]
    assert variants(timed + warmed_up, 2048 // BLOCK_SIZE) <= variants(SIZES, TABLE_BLOCKS)


def test_the_garbage_collector_waits_while_a_forward_is_compiled(monkeypatch):
    engine = with_tree(tiny_model("llama"), random_head(), 3, 3)
    collects, verify = [], engine.target.verify
    monkeypatch.setattr(engine.target, "verify", lambda batch: collects.append(gc.isenabled()) or verify(batch))
    prepare(engine.target, new_pool(engine, engine.target, 20), compile=False)
    assert collects == [True, False]
    assert gc.isenabled()
