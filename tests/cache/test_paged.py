"""The paged cache: decoding gives the same tokens as on the dense cache, for every architecture that supports it."""

import sys
from dataclasses import replace
from unittest.mock import Mock

import psutil
import pytest
import torch

from helpers.attention import tree_attention_reference
from helpers.generation import noted, same_as_model
from helpers.models import (
    ARCHITECTURES,
    VOCAB,
    assert_close_by_scale,
    paged,
    tiny_drafter,
    tiny_model,
    uneven_batch,
    with_tree,
)
from helpers.steps import read_prompts, verify
from redrafter import ArgumentError, CacheFullError, Engine
from redrafter.attention.tree_attention import ATTENTION_NAME, gathered_attention
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting.drafter import RecurrentProposer
from redrafter.drafting.proposer import UndraftedProposer
from redrafter.engine.options import EngineOptions
from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.model.linear_layers import linear_calls, same_inputs
from redrafter.model.target import Target
from redrafter.tree.token_tree import tree_of

NEW = 20


@pytest.mark.parametrize(("window", "chunk_size"), [(0, 0), (4, 0), (0, 4)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("only", [5, 3])
def test_attention_on_a_cpu_equals_the_reference(window, chunk_size, softcap, sinks, only):
    """With rows of unequal length, nodes of an earlier forward, and padding at the end."""
    random = torch.Generator().manual_seed(only)
    lengths, table = torch.tensor([21, 3]), torch.tensor([[3, 1, 6], [4, 2, 0]]).int()
    parents, depth = torch.tensor([0, 0, 0, 1, 2]).expand(2, 5), torch.tensor([0, 1, 1, 2, 2]).expand(2, 5)
    tree = tree_of(torch.zeros(2, 5, dtype=torch.long), parents, depth, 2)
    tree = replace(tree, ancestors=tree.ancestors[:, -only:])
    shapes = [LayerShape(2, 8, 6, torch.float32, torch.device("cpu"))]
    q, k, v = (torch.randn(2 * only + 3, *shape, generator=random) for shape in ((4, 8), (2, 8), (2, 6)))
    results = []
    for gathered in (False, True):
        store = KVCachePool(shapes, 8)
        for pool in store.pools:
            pool.normal_(generator=torch.Generator().manual_seed(1))
        plan = PagedCache(store, table).plan(tree, lengths, (0,), None, len(q))
        settings = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks, "chunk_size": chunk_size}
        inputs = AttentionInputs.from_arguments(q, k, v, *plan.pools[0], *plan.tensors, **settings)
        out = gathered_attention(plan, inputs) if gathered else tree_attention_reference(inputs)
        results.append((out, *store.pools))
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


LENGTHS, TABLE = torch.tensor([9, 6, 1]), torch.tensor([[3, 1], [4, 2], [6, 5]]).int()
PROMPTS = (torch.arange(27).view(3, 9) * 7 + 11) % VOCAB
PARENTS, DEPTH = torch.tensor([0, 0, 0, 1, 2]).expand(3, 5), torch.tensor([0, 1, 1, 2, 2]).expand(3, 5)
TREE = tree_of((torch.arange(15).view(3, 5) * 5 + 3) % VOCAB, PARENTS, DEPTH, 2)


def verified(target, tree, cache=None):
    """Return what a target says of trees after the prompts, on a paged cache, or another one."""
    cache = PagedCache(KVCachePool(target.paged_shapes, 7), TABLE) if cache is None else cache
    read_prompts(target, PROMPTS, LENGTHS, cache)
    return cache, verify(target, tree, LENGTHS, cache)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_ragged_or_packed_forward_equals_a_dense_one_before_and_after_merging(architecture):
    model = tiny_model(architecture)
    target = Target(model)
    before = dict(model.named_modules())
    dense = target.new_cache(3)
    dense.reserve(32)
    counts = [5, 1, 3]
    with torch.inference_mode():
        _, expected = verified(target, TREE, dense)
        for _ in range(2):
            cache, packed = verified(target, TREE)
            _, ragged = verified(target, replace(TREE, counts=torch.tensor(counts), total=9))
            for of_all, of_some, of_dense in zip(packed, ragged, expected, strict=True):
                assert_close_by_scale(of_all, of_dense, 2e-5)
                for row, count in enumerate(counts):
                    torch.testing.assert_close(of_some[row, :count], of_all[row, :count], rtol=1e-4, atol=1e-4)
            target.varlen_forward.fuse_linears(lambda cache=cache: verify(target, TREE, LENGTHS, cache))
    assert before == dict(model.named_modules())  # the fused layers were removed again
    assert model.config._attn_implementation != ATTENTION_NAME
    assert not target.head._forward_pre_hooks


def test_what_another_request_computed_is_not_computed_again(llama, monkeypatch):
    engine = paged(with_tree(llama, tiny_drafter(), 5, 3))
    prompt = (torch.arange(1, 50) * 13 % VOCAB)[None]
    arguments = {"max_new_tokens": 20, "do_sample": False}
    first = engine.generate(prompt, **arguments)
    other = torch.cat([first[:, :60], torch.tensor([[5, 6]])], dim=1)
    expected = llama.generate(other, **arguments)
    counts = noted(
        monkeypatch, engine.target.prompt_reader, "read_prompts", lambda _, read: sum(read.ends) - sum(read.starts)
    )
    assert torch.equal(engine.generate(other, **arguments), expected)
    assert counts == [62 - 48]  # three blocks of 16 were stored: of the prompt, and of the tokens generated after it
    counts.clear()
    assert torch.equal(engine.generate(prompt, **arguments), first)
    assert counts == [1]  # 48 of 49 were stored


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": [0.6, 0.9, 1.2, 0.8, 1.0], "top_k": 0, "seed": 4}]
)
def test_rows_that_are_left_go_on_in_a_smaller_batch_under_another_tree(llama, sampling):
    ids, mask = uneven_batch(rows=5)
    arguments = {"max_new_tokens": 40, "eos_token_id": [2, 5, 11, 30, 31, 32, 40], "do_sample": False} | sampling
    engine = paged(with_tree(llama, tiny_drafter(), 4, 3))
    expected = engine.generate(ids, mask, speculate=False, **arguments)
    trees = {1: RecurrentProposer(engine.drafter, engine.target, 3, 6, 12), 8: engine.proposer}
    asked = []
    engine.proposer_for = lambda rows: asked.append(rows) or trees.get(rows) or engine.undrafted
    out = engine.generate(ids, mask, return_dict_in_generate=True, **arguments)
    assert torch.equal(out.sequences, expected)
    assert len(set(row.emitted for row in out.stats.rows)) > 2  # or no batch became smaller
    assert set(asked) == {1, 2, 4, 8}
    assert len(out.stats.accepted_by_depth) == 6
    dense = with_tree(llama, tiny_drafter(), 4, 3).generate(ids, mask, **arguments)
    assert torch.equal(dense, expected)
    assert engine.memory.blocks.num_free_blocks == 199


def test_memory_comes_back_whatever_happens(llama):
    engine = paged(with_tree(llama, tiny_drafter(), 5, 3), blocks=6)
    pool = engine.memory.blocks
    ids, mask = uneven_batch()
    with pytest.raises(CacheFullError, match="kv_cache_free_gpu_memory_fraction"):
        engine.generate(ids, mask, max_new_tokens=60)
    assert pool.num_free_blocks == 5

    breaks = Mock(put_step=Mock(side_effect=KeyError("mine")))
    with pytest.raises(KeyError):
        engine.generate(ids[:1], mask[:1], max_new_tokens=10, streamer=breaks)
    assert pool.num_free_blocks == 5
    assert engine.generate(ids[:1], mask[:1], max_new_tokens=10).shape == (1, ids.shape[1] + 10)


def test_a_prefill_that_failed_leaves_nothing_to_reuse(llama, monkeypatch):
    engine = paged(with_tree(llama, tiny_drafter(), 5, 3))
    prompt = (torch.arange(1, 50) * 13 % VOCAB)[None]
    with monkeypatch.context() as patch:
        patch.setattr(engine.target.prompt_reader, "_read_pieces", Mock(side_effect=KeyError("mine")))
        with pytest.raises(KeyError):
            engine.generate(prompt, max_new_tokens=8, do_sample=False)
    same_as_model(engine, prompt, max_new_tokens=8)
    assert engine.memory.blocks.num_free_blocks == 199


def test_a_request_within_a_request_disturbs_neither(llama):
    engine = paged(with_tree(llama, tiny_drafter(), 5, 3))
    ids, mask = uneven_batch()
    expected = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    inner = engine.generate(ids[1:2], mask[1:2], max_new_tokens=4, do_sample=False)
    inner_texts = []
    within = lambda *_: inner_texts.append(engine.generate(ids[1:2], mask[1:2], max_new_tokens=4, do_sample=False))  # noqa: E731
    outer = engine.generate(ids, mask, max_new_tokens=NEW, do_sample=False, streamer=Mock(put_step=within))
    assert torch.equal(outer, expected)
    assert all(torch.equal(text, inner) for text in inner_texts)


def test_lengths_have_limits(llama):
    engine = Engine(Target(llama), UndraftedProposer(), EngineOptions(max_input_len=12, max_seq_len=20))
    prompt = torch.arange(3, 14)[None]
    assert engine.generate(prompt, max_new_tokens=50).shape[1] <= 20
    with pytest.raises(ArgumentError, match="13 tokens; a prompt may have 12"):
        engine.generate(torch.arange(3, 16)[None], max_new_tokens=2)


@pytest.mark.parametrize("name", ["max_input_len", "max_seq_len"])
def test_lengths_above_the_context_are_refused_with_its_number(llama, name):
    target = Target(llama)
    Engine(target, UndraftedProposer(), EngineOptions(**{name: target.context}))
    with pytest.raises(ArgumentError, match=f"{name} is {target.context + 1}, .* give {target.context} at most"):
        Engine(target, UndraftedProposer(), EngineOptions(**{name: target.context + 1}))


def test_layers_that_read_one_tensor_are_found_without_their_names(llama):
    with linear_calls(llama) as calls:
        llama(torch.arange(5)[None])
    groups = [group for group in same_inputs(calls) if len(group) > 1]
    assert [[name.rpartition(".")[2] for name in group] for group in groups] == [
        ["q_proj", "k_proj", "v_proj"],
        ["gate_proj", "up_proj"],
    ] * llama.config.num_hidden_layers


def test_merged_weights_are_the_models_own_and_can_be_trained_and_saved(llama, tmp_path):
    model = tiny_model("llama")
    engine = paged(with_tree(model, tiny_drafter(), 2, 2))
    q, k = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    prompt = torch.arange(3, 12)[None]
    engine.generate(prompt, max_new_tokens=NEW, do_sample=False)
    with torch.no_grad():
        q.mul_(-1)
    same_as_model(engine, prompt + 1, max_new_tokens=NEW)
    model(prompt, labels=prompt).loss.backward()
    assert q.grad is not None
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems write the zeros")
def test_a_pool_on_a_cpu_is_zeros_and_takes_no_memory_before_it_is_written():
    for _ in range(2):  # the second one has the addresses of the first
        before = psutil.Process().memory_info().rss
        pool = KVCachePool([LayerShape(2, 8, 8, torch.float32, torch.device("cpu"))], 1 << 16).pools[0]
        assert pool.nbytes == 1 << 27
        assert psutil.Process().memory_info().rss - before < pool.nbytes / 4
        assert not pool.any()
        pool.fill_(1)
        del pool


@pytest.mark.parametrize("num_blocks", [1, 3, 17, 40])
def test_a_small_pool_is_zeros_where_memory_of_other_numbers_was(num_blocks):
    shape = LayerShape(1, 5, 5, torch.bfloat16, torch.device("cpu"))
    for _ in range(8):
        pool = KVCachePool([shape], num_blocks).pools[0]
        assert not pool.any()
        pool.fill_(1)
