"""Triton kernels against their slow references in torch, in Triton's interpreter where there is no GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE, HALF
from helpers.outcomes import on_device, random_outcome, random_scores
from redrafter import kernels
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.kernels import linear
from redrafter.kernels.block_size import BLOCK_SIZE, CHUNK
from redrafter.kernels.cache_format import as_bytes, read_slots, round_trip, to_format, write_slots
from redrafter.kernels.cache_tiles import commit
from redrafter.kernels.launch import Tiling
from redrafter.kernels.linear import split_k_linear
from redrafter.kernels.tree import find_ancestors
from redrafter.kernels.tree import top_continuations as kernel_top_continuations
from redrafter.model.forward_batch import ForwardBatch
from redrafter.sampling.noise import gumbel
from redrafter.sampling.sampler import Sampler, check_draws
from redrafter.tree.beam_search import top_continuations
from redrafter.tree.report import accept_drafts
from redrafter.tree.token_tree import hold_best, token_order, tree_of

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_numbers_out_of_range_become_the_largest_ones(kv_dtype, dtype):
    largest = torch.finfo(kv_dtype).max
    wide = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.04 * largest, 1.0]).to(dtype)
    assert round_trip(wide, kv_dtype).tolist() == [largest, -largest, largest, 1.0]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_is_stored_is_read_back_and_rounded_once(kv_dtype):
    store, slots = torch.zeros(8, 2, 16, dtype=kv_dtype), torch.tensor([5, 0, 3])
    states = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    write_slots(store, slots, states)
    read = read_slots(store, slots, torch.float32)
    assert torch.equal(read, round_trip(states, kv_dtype))
    assert torch.equal(read, round_trip(read, kv_dtype))
    assert not torch.equal(read, states)


@pytest.mark.parametrize("kv_dtype", [torch.float32, *FORMATS])
def test_committing_equals_one_gather_and_scatter(kv_dtype):
    generator = torch.Generator().manual_seed(0)
    pool = to_format(torch.randn(3, 20 * BLOCK_SIZE, 2, 40, generator=generator), kv_dtype).to(DEVICE)
    table = (torch.randperm(19, generator=generator)[:12] + 1).view(3, 4).int().to(DEVICE)
    length = torch.tensor([0, 13, 30], device=DEVICE)
    nodes = torch.tensor([[0, 1, 2, 3, 0], [0, 2, 5, 9, 0], [0, 3, 0, 0, 0]], device=DEVICE)
    slots = lambda at: (table.gather(1, at // BLOCK_SIZE) * BLOCK_SIZE + at % BLOCK_SIZE).flatten()  # noqa: E731
    expected = as_bytes(pool).clone()
    expected[:, slots(length[:, None] + torch.arange(5, device=DEVICE))] = expected[:, slots(length[:, None] + nodes)]
    commit(pool, table, length, nodes)
    assert torch.equal(as_bytes(pool), expected)


def variants(*cases: tuple[int, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.variant) for case in cases]


LARGE = variants((3, 4, 1024, 10), (1, 32, 1100, 32))


@pytest.mark.parametrize(("rows", "beams", "vocab", "wide"), [(2, 1, 50, 3), (1, 5, 2500, 5), *LARGE])
def test_top_continuations_equal_the_reference(rows, beams, vocab, wide):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, beams, vocab, generator=generator).to(DEVICE)
    total = torch.randn(rows, beams, generator=generator).to(DEVICE)
    ids = None if rows == 1 else torch.randperm(9000, generator=generator)[:vocab]
    found = kernel_top_continuations(scores, total, wide, None if ids is None else ids.to(DEVICE))
    expected = [x.to(DEVICE) for x in top_continuations(scores.cpu(), total.cpu(), wide, ids)]
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1027, *variants((40,), (2100,))])
def test_of_equal_continuations_the_first_is_found_and_nan_and_infinity_are_last(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    scores, total = torch.randn(2, 3, vocab, generator=generator).round(), torch.randn(2, 3, generator=generator)
    scores[:, :, 16:24] = 3.0  # equal neighbours
    for special in (torch.nan, torch.inf, -torch.inf, -0.0):
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = special
    scores[1, 0], scores[1, 0, -3:] = -torch.inf, 1.0  # fewer numbers than are wanted
    scores = scores.to(dtype)
    x = scores.float()
    log_probs = torch.where(x < torch.inf, x, -3e38).log_softmax(-1) + total[:, :, None]
    expected, pair = log_probs.flatten(1).sort(stable=True, descending=True)
    found, source, token = kernel_top_continuations(scores.to(DEVICE), total.to(DEVICE), 16, None)
    assert torch.allclose(found.cpu(), expected[:, :16], atol=1e-5)
    assert torch.equal((source * vocab + token).cpu(), pair[:, :16])


@pytest.mark.parametrize("named", [False, True])
def test_scores_that_all_beams_share_are_read_once(named):
    generator = torch.Generator().manual_seed(2)
    one, total = (torch.randn(2, *size, generator=generator).to(DEVICE) for size in ((1, 1100), (4,)))
    ids = torch.randperm(9000, generator=generator)[:1100].to(DEVICE) if named else None
    shared, apart = (kernel_top_continuations(x, total, 6, ids) for x in (one.expand(-1, 4, -1), one.repeat(1, 4, 1)))
    assert all(torch.equal(*pair) for pair in zip(shared, apart, strict=True))
    assert len(shared[1].unique()) > 1
    ones = (one.expand(-1, 4, -1)[:, :, :50], one[:, :, :50].repeat(1, 4, 1))  # whose rows are apart
    found, expected = (kernel_top_continuations(x, total, 3, None) for x in ones)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("vocab", "size"), [(2049, 2), *variants((3000, 2), (5000, 4))])
def test_continuations_of_ids_that_ranks_divide_are_those_of_all_ids(vocab, size):
    generator = torch.Generator().manual_seed(3)
    scores, total = (torch.randn(2, *shape, generator=generator).to(DEVICE) for shape in ((3, vocab), (3,)))
    scores[:, :, -1] += 9.0  # ids of the last rank are chosen too
    names = torch.randperm(9000, generator=generator)[:vocab].to(DEVICE)
    share = -(-vocab // (size * CHUNK)) * CHUNK
    parts = [slice(first, min(first + share, vocab)) for first in range(0, vocab, share)]
    messages = list[torch.Tensor]()

    def find(part: slice, exchange: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        own = scores[:, :, part]
        return kernel_top_continuations(own, total, 5, names, first=part.start, vocabulary=vocab, share=exchange)

    for part in parts:
        find(part, lambda message: messages.append(message.clone()) or message)
    assert all(message.nbytes % 16 == 0 for message in messages)
    expected = kernel_top_continuations(scores, total, 5, names)
    for part in parts:
        (score, *chosen), (expected_score, *expected_chosen) = find(part, lambda message: sum(messages)), expected
        assert all(torch.equal(*pair) for pair in zip(chosen, expected_chosen, strict=True))
        # A GPU adds the numbers of a chunk in another order where rows begin at other addresses.
        near = {"rtol": 1e-6, "atol": 2e-6} if DEVICE == "cuda" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(score, expected_score, **near)


def test_no_continuation_is_likelier_than_its_beam():
    """A tree that is cut keeps the likeliest nodes, and must never keep one without the node that it hangs on."""
    generator = torch.Generator().manual_seed(1)
    rows = 64 if DEVICE == "cuda" else 20  # an interpreter takes its time
    certain = torch.full((rows, 3, 200), -40.0)
    certain[:, :, 7] = 23.7 + torch.rand(rows, 3, generator=generator)
    total = -30 * torch.rand(rows, 3, generator=generator)
    score, source, _ = kernel_top_continuations(certain.to(DEVICE), total.to(DEVICE), 3, None)
    assert bool((score.cpu() <= total.gather(1, source.cpu())).all())


def test_a_nan_leads_to_no_id_past_the_vocabulary():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 0], logits[0, 1, 7:], logits[1, 2, 30] = torch.nan, torch.nan, torch.nan
    zeros = torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    ones, noise = torch.ones(2, device=DEVICE), torch.zeros(2, 1, 50, device=DEVICE)
    for optional_noise in (None, noise):
        drawn = kernels.sample.draw_tokens(logits, ones, optional_noise, zeros, None)
        assert torch.equal(drawn, check_draws(logits, logits.argmax(-1)))
        assert drawn[..., 1].tolist() == [[0, 0, 1], [1, 1, 0]]
    for ids in (None, torch.arange(100, 150, device=DEVICE)):
        score, source, token = kernel_top_continuations(logits, torch.zeros(2, 3, device=DEVICE), 5, ids)
        first = 0 if ids is None else 100
        assert 0 <= source.min() <= source.max() < 3
        assert first <= token.min() <= token.max() < first + 50
        pairs = zip(source.tolist(), token.tolist(), strict=True)
        assert all(
            len(set(zip(*row, strict=True))) == 5 for row in pairs
        )  # of two equal siblings, both would be accepted
        assert score.isfinite().all()


def test_ancestors_found_by_walking_up_equal_those_found_by_squaring():
    generator = torch.Generator().manual_seed(0)
    parents = torch.stack([torch.randint(0, max(i, 1), (2,), generator=generator) for i in range(70)], 1)
    tokens = torch.zeros_like(parents)
    expected = tree_of(tokens, parents, tokens, 69).ancestors
    assert torch.equal(find_ancestors(parents.to(DEVICE), 69).cpu(), expected)


@pytest.mark.parametrize("rows, nodes", [(1, 1), (4, 10), (3, 300), (40, 5)])
def test_tokens_of_trees_are_ordered_as_by_the_reference(rows, nodes):
    counts = random_outcome(rows, nodes, shared=True, limited=False)["tree"].counts
    expected = token_order(counts, nodes, int(counts.sum()))
    for x, wanted in zip(
        kernels.token_order.token_order(counts.to(DEVICE), nodes, int(counts.sum())), expected, strict=True
    ):
        assert x.cpu().equal(wanted)


@pytest.mark.parametrize("nodes, new", [(13, 1), (13, 4), (13, 13), (300, 290)])
def test_slots_of_new_nodes_equal_those_of_a_cache(nodes, new):
    outcome = random_outcome(5, nodes, shared=True, limited=False)
    tree, length = replace(outcome["tree"], ancestors=outcome["tree"].ancestors[:, -new:]), outcome["length"]
    length[1:3] = torch.tensor([0, 60])  # the end of a window of four blocks is near
    table = (torch.randperm(24, generator=torch.Generator().manual_seed(0))[:20] + 1).view(5, 4).int()
    store = KVCachePool([LayerShape(1, 2, 2, torch.float32, torch.device("cpu"))], 25)
    expected = ForwardBatch(tree, length, PagedCache(store, table)).slots()
    found = kernels.token_order.new_slots(*(x.to(DEVICE) for x in (tree.parents, tree.depth, length, table)), new)
    assert found.cpu().equal(expected)


@pytest.mark.parametrize("rows, nodes", [(1, 1), (4, 10), (3, 70), (40, 5)])
def test_the_best_nodes_of_all_rows_are_held_as_by_the_reference(rows, nodes):
    tree = random_outcome(rows, nodes, shared=True, limited=False)["tree"]
    # Ties are frequent, across rows too, and a row may take no drafts.
    score = (4 * random_scores(tree)).floor().masked_fill(torch.arange(rows)[:, None] % 3 == 2, -torch.inf)
    for total in {rows, rows + (rows * nodes - rows) // 3, rows * nodes}:
        expected = hold_best(tree.tokens, tree.parents, tree.depth, score, total)
        moved = kernels.tree.hold_best(*(x.to(DEVICE) for x in (tree.tokens, tree.parents, tree.depth, score)), total)
        assert expected[-1].sum() == total
        for x, wanted in zip(moved, expected, strict=True):
            assert x.cpu().equal(wanted)


@pytest.mark.parametrize("rows, nodes", [(1, 1), (4, 10), (3, 70)])
def test_the_best_nodes_of_each_row_are_kept_as_by_the_reference(rows, nodes):
    tree = random_outcome(rows, nodes, shared=False, limited=False)["tree"]
    score = (4 * random_scores(tree)).floor().masked_fill(torch.arange(rows)[:, None] % 3 == 2, -torch.inf)
    score[:, 0] = 0.0
    for node in range(1, nodes):  # never higher than the parent's
        score[:, node] = torch.minimum(score[:, node], score.gather(1, tree.parents[:, node, None])[:, 0])
    for count in {1, -(-nodes // 3), nodes}:
        expected = hold_best(tree.tokens, tree.parents, tree.depth, score, count, by_row=True)
        tensors = (x.to(DEVICE) for x in (tree.tokens, tree.parents, tree.depth, score))
        kept = kernels.tree.hold_best(*tensors, count, by_row=True)
        assert kept[-1].tolist() == [count] * rows
        for x, wanted in zip(kept, expected, strict=True):
            assert x.cpu().equal(wanted)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("rows, nodes", [(1, 1), (5, 13), (3, 70)])
def test_drafts_are_accepted_and_reported_as_by_the_reference(rows, nodes, limited, shared):
    outcome = random_outcome(rows, nodes, shared=shared, limited=limited)
    tree, texts, limits = outcome["tree"], outcome["texts"].clone().to(DEVICE), outcome["limits"]
    path, report, after = accept_drafts(**outcome)
    drawn, finite = torch.stack([outcome["drawn"], outcome["finite"]], dim=2).to(DEVICE).unbind(2)
    tree = on_device(tree, DEVICE)
    found = kernels.accept.accept_drafts(
        tree.tokens, tree.parents, tree.depth, drawn, finite, texts, outcome["length"].to(DEVICE),
        outcome["active"].to(DEVICE), levels=tree.levels, width=outcome["max_depth"] + 1, grafted=tree.grafted,
        counts=tree.counts, limits=None if limits is None else limits.to(DEVICE),
    )  # fmt: skip
    for x, expected in zip((*found, texts), (path.nodes, report.packed, after, outcome["texts"]), strict=True):
        assert x.cpu().equal(expected)


def test_a_draft_is_not_accepted_below_one_that_was_not_verified():
    tokens, parents, depth, drawn = (
        torch.tensor([x], device=DEVICE) for x in ([5, 6, 7], [0, 2, 0], [0, 2, 1], [7, 1, 6])
    )
    one, counts = torch.ones_like(drawn[:, 0]), torch.tensor([2], device=DEVICE)
    _, packed, after = kernels.accept.accept_drafts(
        tokens, parents, depth, drawn, drawn, torch.zeros_like(drawn).repeat(1, 3), one, one > 0, levels=2, width=3,
        grafted=0, counts=counts, limits=None,
    )  # fmt: skip
    assert packed[0, 3] == 0
    assert after == 2


@pytest.mark.parametrize("tokens, features, inner", [(1, 128, 1024), (5, 192, 512), (33, 64, 2048)])
def test_a_split_product_equals_that_of_torch(tokens, features, inner):
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, inner, generator=generator).to(DEVICE, HALF) for n in (tokens, features))
    for _ in range(2):  # the counts are 0 again
        found = split_k_linear(x, weight)
        assert torch.allclose(found.float(), x.float() @ weight.float().T, atol=0.2, rtol=5e-3)


@pytest.mark.parametrize(
    ("features", "inner", "shared", "splits", "stages"),
    [
        (4096, 2048, 227, 1, 6),
        (4096, 14336, 227, 2, 6),  # parts of at most 8,192 input features
        (1536, 4096, 227, 4, 6),  # few tiles
        (4096, 2048, 99, 1, 4),  # a GPU with less shared memory
    ],
)
def test_a_split_product_fits_its_gpu(features, inner, shared, splits, stages, monkeypatch):
    found = list[Tiling]()
    monkeypatch.setattr(linear, "shared_memory", lambda device: shared << 10)
    monkeypatch.setattr(linear, "_product", lambda x, weight, scale, bias, tiling, residual: found.append(tiling))
    split_k_linear(torch.ones(1, inner, dtype=HALF), torch.ones(features, inner, dtype=HALF))
    assert (found[0].splits, found[0].stages) == (splits, stages)


@pytest.mark.parametrize("strided", [False, True])
def test_a_split_product_adds_a_bias_and_is_a_residual_layer(strided):
    """A weight may be some columns of another one."""
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(*n, generator=generator).to(DEVICE, HALF) for n in ((7, 1024), (1024, 2048), (1024,))
    )
    weight = 0.03 * weight
    weight = weight[:, 512:-512] if strided else weight[:, :1024].contiguous()
    product = x.float() @ weight.float().T + bias.float()
    torch.testing.assert_close(split_k_linear(x, weight, bias).float(), product, atol=0.05, rtol=1e-2)
    found = split_k_linear(x, weight, bias, residual=True).float()
    torch.testing.assert_close(found, x.float() + torch.nn.functional.silu(product), atol=0.05, rtol=1e-2)


def test_sampling_equals_an_argmax_with_noise():
    generator = torch.Generator().manual_seed(0)
    for rows, nodes, vocab in ((1, 3, 50), (2, 5, 9000)):
        logits = torch.randn(rows, nodes, vocab, generator=generator).to(DEVICE)
        logits[:, 1, :40] = 7.0  # a tie is the first one's
        temperature = torch.rand(rows, generator=generator).to(DEVICE) + 0.5
        depth = torch.randint(0, 3, (rows, nodes), generator=generator).to(DEVICE)
        noise = torch.randn(rows, 3, vocab, generator=generator).to(DEVICE)
        found = kernels.sample.draw_tokens(logits, temperature, None, depth, None)
        assert torch.equal(found, check_draws(logits, logits.argmax(-1)))
        scores = logits / temperature[:, None, None] + noise.gather(1, depth[:, :, None].expand_as(logits))
        found = kernels.sample.draw_tokens(logits, temperature, noise, depth, None)
        assert torch.equal(found, check_draws(logits, scores.argmax(-1)))


@pytest.mark.parametrize("names", ["none", "of all", "of each beam"])
def test_scores_of_drafts_under_noise_equal_the_reference(names):
    generator, rows, beams, count = torch.Generator().manual_seed(0), 3, 2, 4100
    logits = torch.randn(rows, beams, count, generator=generator).bfloat16()
    noise = torch.randn(rows, 3, 5000, generator=generator)
    ids = {"of all": torch.randperm(5000, generator=generator)[:count]}.get(names)
    if names == "of each beam":
        ids = torch.randint(5000, (rows, beams, count), generator=generator)
    sampler = Sampler(None, (), torch.rand(rows, generator=generator) + 0.5, *[torch.arange(rows)] * 3)
    given = noise if ids is not None else noise[:, :, :count]
    found = kernels.sample.noisy_scores(
        logits.to(DEVICE),
        sampler.temperature.to(DEVICE),
        given.to(DEVICE)[:, 1],
        None if ids is None else ids.to(DEVICE),
    )
    torch.testing.assert_close(found.cpu(), sampler.draft_scores(logits, given, 1, ids))


def test_nodes_of_any_rows_are_sampled_as_those_of_their_rows(monkeypatch):
    monkeypatch.setattr(Sampler, "fused", True)
    generator, rows, vocab = torch.Generator().manual_seed(0), 3, 300
    noise = torch.randn(rows, 4, vocab, generator=generator).to(DEVICE)
    temperature = torch.rand(rows, generator=generator).to(DEVICE) + 0.5
    row, depth = torch.tensor([[0, 1, 1, 1, 2, 2], [0, 0, 1, 3, 0, 2]]).to(DEVICE)
    logits = torch.randn(len(row), vocab, generator=generator).to(DEVICE)
    ids = torch.arange(vocab, device=DEVICE)
    sampler = Sampler(None, (), temperature, row, row, ids)
    logits[1, 7] = torch.inf
    scores = logits / temperature[row][:, None] + noise[row, depth]
    for drawn, with_noise in ((scores, noise), (logits, None)):
        expected = check_draws(logits[None], drawn.argmax(-1)[None])[0]
        assert torch.equal(sampler.draw_nodes(logits, with_noise, row, depth), expected)


def test_noise_equals_the_reference():
    seeds, positions = torch.tensor([-3, 2**62 + 5]), torch.tensor([[0, 1, 900], [5, 6, 7]])
    expected = gumbel(seeds, positions, torch.arange(9000))
    found = kernels.sample.gumbel(seeds.to(DEVICE), positions.to(DEVICE), torch.arange(9000)).cpu()
    assert torch.allclose(found, expected, atol=2e-6, rtol=2e-6)
