"""Batch-invariant targets: the same logits, bit for bit, however many tokens share a forward; or a refusal by name."""

import functools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.models import CHUNKED, VOCAB, assert_close_by_scale, tiny_model
from helpers.recurrent import recurrent_model
from helpers.steps import read_prompts, verify
from redrafter import UnsupportedError
from redrafter.attention import invariant_attention
from redrafter.attention.tree_plan import PromptChunks
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.features import BATCH_INVARIANCE
from redrafter.kernels import invariant_linear
from redrafter.model.batch_invariance import check_rows, small_pool
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.target import Target
from redrafter.tree.token_tree import chain, tree_of

LONG = {"max_position_embeddings": 512}
MODELS = dict.fromkeys(
    ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"), LONG
)
MODELS["mixtral"] = LONG | {"num_local_experts": 4, "num_experts_per_tok": 2}
TEXT = 206  # tokens
FORMS = [(model, torch.bfloat16) for model in MODELS]
FORMS += [(model, dtype) for model in ("llama", "qwen3_moe") for dtype in (torch.float32, torch.float16)]
each_form = pytest.mark.parametrize(("model", "dtype"), FORMS, ids=lambda x: str(x).removeprefix("torch."))


@functools.cache
def target(model, dtype):
    made = Target(tiny_model(model, **MODELS[model]).to(dtype))
    made.make_batch_invariant()
    return made


def text(rows=1):
    return torch.randint(3, VOCAB, (rows, TEXT), generator=torch.Generator().manual_seed(rows))


def new_cache(target, rows=1):
    blocks = TEXT // 16 + 4
    table = torch.arange(1, 1 + rows * blocks, dtype=torch.int32).view(rows, blocks)
    return PagedCache(KVCachePool(target.paged_shapes, 1 + rows * blocks), table)


@torch.inference_mode()
def read(target, ids, sizes, cache=None):
    """Return the logits of a text, `[T, V]`, read as chains of these numbers of tokens."""
    cache, logits, first = cache or new_cache(target), [], 0
    for size in sizes:
        logits.append(verify(target, chain(ids[:, first : first + size]), torch.tensor([first]), cache)[0][0])
        first += size
    return torch.cat(logits)


@functools.cache
def expected(model, dtype):
    """Return the logits of the text, `[T, V]`, most tokens the only ones of their forwards."""
    return read(target(model, dtype), text(), [1] * 42 + [48] + [1] * 10 + [106])


@pytest.mark.costly
@pytest.mark.parametrize("model", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_the_model(model):
    bound = target(model, torch.float32)
    assert_close_by_scale(read(bound, text(), [TEXT]), bound.model(input_ids=text()).logits[0], 1e-4)


@each_form
def test_logits_are_the_same_for_any_number_of_tokens(model, dtype):
    for sizes in ([200, 6], [2, 7, 26, 64, 107]):
        assert torch.equal(read(target(model, dtype), text(), sizes), expected(model, dtype))


@pytest.mark.costly
@each_form
@torch.inference_mode()
def test_logits_are_the_same_in_a_tree_among_rows(model, dtype):
    bound, n = target(model, dtype), 90
    ids, others = text(), text(rows=3)
    cache = new_cache(bound, rows=3)
    others[1] = ids[0]
    lengths = torch.tensor([17, n, 64])
    read_prompts(bound, others, lengths, cache)
    parents, depth = torch.tensor([[0, 0, 0, 1, 2, 4, 5, 6]]), torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5]])
    path = torch.tensor([0, 2, 4, 5, 6])
    tokens = others.gather(1, lengths[:, None] + depth) * 5 % VOCAB
    tokens[1, path] = ids[0, n : n + 5]
    tree = tree_of(tokens, parents.expand(3, -1), depth.expand(3, -1), 5)
    for each in (tree, replace(tree, counts=torch.tensor([1, 8, 3]), total=12)):
        logits, _ = verify(bound, each, lengths, cache)
        assert torch.equal(logits[1, path], expected(model, dtype)[n : n + 5])


@pytest.mark.parametrize("model", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_a_chunk_beside_trees_leaves_the_same_logits(model, dtype=torch.bfloat16):
    bound = target(model, dtype)
    ids, cache = text(), new_cache(bound, rows=2)
    trees = PagedCache(cache.pool, cache.table[:1])
    read_prompts(bound, text(rows=2)[:1], torch.tensor([31]), trees)
    room = PromptChunks.room(4, cache.table.shape[1], torch.device("cpu"))
    for first, end in ((0, 40), (40, 41), (41, 70)):
        room.tokens[: end - first] = ids[0, first:end]
        room.starts[1:], room.lengths[0], room.table[0] = end - first, first, cache.table[1]
        batch = ForwardBatch(chain(torch.full((1, 5), 9)), torch.tensor([31]), trees, chunks=room)
        ends = bound.verify(batch).chunk_ends
        assert torch.equal(ends.logits[0], expected(model, dtype)[end - 1])


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "gemma3_text"])
@torch.inference_mode()
def test_prompts_may_be_cut_anywhere(model):
    bound, rows = target(model, torch.bfloat16), text(rows=2)
    rows[0] = text()[0]
    for cut in [1, 2, 7, 15, 16, 17, 26, 39]:
        cache = new_cache(bound, rows=2)
        starts, ends = torch.tensor([cut, 3]), torch.tensor([40, 5])
        read_prompts(bound, rows, starts, cache)
        logits, _ = read_prompts(bound, rows, ends, cache, starts=starts, max_tokens=23)
        assert torch.equal(logits[0], expected(model, torch.bfloat16)[39])


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_what_prompt_scores_show_is_the_same(model):
    bound, shown, ids = target(model, torch.bfloat16), [], text()[:, :60]
    show = lambda *x: shown.append(x[2].clone())  # noqa: E731
    read_prompts(bound, ids, torch.tensor([60]), new_cache(bound), max_tokens=13, show=show)
    assert torch.equal(torch.cat(shown), expected(model, torch.bfloat16)[:60])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_numbers_at_the_end_of_a_tensor_are_computed_as_all_others(activation):
    """An odd width, with which the activations of a forward fill no whole number of vectors."""
    bound = Target(tiny_model("llama", intermediate_size=45, hidden_act=activation))
    bound.make_batch_invariant()
    for sizes in ([8] * 8, [16] * 4, [1] * 64):
        assert torch.equal(read(bound, text()[:, :64], sizes), read(bound, text()[:, :64], [64]))


@torch.inference_mode()
def test_two_threads_change_no_bit_of_one_another():
    bound, threads = target("qwen3", torch.float32), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(read(bound, text(), [6]), read(bound, text(), [1] * 6))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("broken", ["products", "attention"])
def test_an_order_that_follows_from_the_number_of_tokens_is_refused(broken, monkeypatch):
    if broken == "products":
        # Not torch's own product: on some processors its order does not follow from the number of tokens.
        by_tokens = lambda x, weight, bias: nn.functional.linear(x, weight, bias) * (1 + 1e-3 * len(x))  # noqa: E731
        monkeypatch.setattr(invariant_linear, "_in_blocks", by_tokens)
    else:
        monkeypatch.setattr(invariant_attention, "splits", lambda end: iter([range(0, end + 64)]))
        monkeypatch.setattr(invariant_attention, "TILE", 8)
        by_tokens = lambda x: torch.cat([x, x.new_zeros(0, *x.shape[1:])])  # noqa: E731
        monkeypatch.setattr(invariant_attention, "_padded", by_tokens)
        monkeypatch.setattr(invariant_attention, "TOKENS", 64)
    bound = Target(tiny_model("llama", hidden_size=128, head_dim=64, num_key_value_heads=4))
    with pytest.raises(UnsupportedError, match="its logits depend on how many tokens share a forward"):
        bound.make_batch_invariant()
    assert BATCH_INVARIANCE not in bound.features
    assert not bound.varlen.ok


def test_a_model_that_fails_in_this_mode_is_refused(monkeypatch):
    bound, fail = Target(tiny_model("llama")), Mock(side_effect=RuntimeError("no such product"))
    with monkeypatch.context() as patch, pytest.raises(UnsupportedError, match="be batch-invariant: no such product"):
        patch.setattr(invariant_linear, "_in_blocks", fail)
        bound.make_batch_invariant()
    assert torch.equal(read(bound, text(), [5]), read(bound, text(), [5]))


def packed() -> PreTrainedModel:
    """Return a model of which one weight is of a quantiser's class."""
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = type("Packed", (nn.Parameter,), {})(layer.weight.data)
    return model


LAYERS = {"attention_types": [[["global", "local", "global"], 1]], "num_heads": 4}
REFUSED = {
    r"transformer\.h\.0\.attn\.c_attn calls addmm": lambda: tiny_model("gpt2"),
    "cannot be batch-invariant: its attention": lambda: tiny_model("gpt_neo", **LAYERS),
    "batch_invariant=True and attention within chunks exclude each other": lambda: tiny_model("llama4_text", **CHUNKED),
    "batch_invariant=True and layers with recurrent states exclude": lambda: recurrent_model("lfm2"),
    r"the weight of model\.layers\.1\.mlp\.up_proj is a Packed": packed,
}


@pytest.mark.parametrize("said", REFUSED)
def test_models_that_cannot_be_computed_so_are_refused_by_name(said):
    with pytest.raises(UnsupportedError, match=said):
        Target(REFUSED[said]()).make_batch_invariant()


def test_routers_and_experts_leave_nothing_on_the_model():
    bound = target("qwen3_moe", torch.float32)
    before = bound.config._experts_implementation
    read(bound, text(), [5])
    assert bound.config._experts_implementation == before != "redrafter_invariant"


def test_a_target_is_made_so_once():
    bound = target("llama", torch.float32)
    forward = bound.varlen_forward
    bound.make_batch_invariant()
    check_rows(forward, small_pool(bound.paged_shapes))
    assert bound.varlen_forward is forward
    assert bound.varlen.ok
