"""Every Triton kernel against its slow reference in torch, in Triton's interpreter where there is no GPU."""

import os
import pkgutil
from functools import partial
from importlib import import_module

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from helpers.attention import DEVICE, check_attention, on_cpu, problem
from helpers.models import assert_close_by_scale
from redrafter import kernels
from redrafter.attention.tree_attention import tree_attention
from redrafter.kernels import commit
from redrafter.kernels import top_continuations as kernel_top_continuations
from redrafter.kernels import tree_attention as kernel
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.linear import split_k_linear
from redrafter.kernels.tree import find_ancestors
from redrafter.sampling.noise import gumbel, streams
from redrafter.tree.beam_search import top_continuations
from redrafter.tree.token_tree import tree_of

check = partial(check_attention, kernel)


@pytest.mark.parametrize("nodes", [1, 7, 26])
@pytest.mark.parametrize("lengths", [[0], [1, 0, 40], [130, 67]])
def test_kernel_equals_the_reference_on_uneven_rows(lengths, nodes):
    check(problem(lengths, nodes))


@pytest.mark.parametrize(
    "shape", [dict(heads=1, group=4), dict(heads=3, group=1), dict(dk=24, dv=16), dict(dk=16, dv=40)]
)
def test_heads_and_widths_of_any_shape(shape):
    check(problem([37, 5], 9, **shape))


@pytest.mark.parametrize("width", [128, 256, 512])
def test_wide_heads_are_attended_to_in_smaller_tiles(width):
    """Compare often on a GPU, where a race among the warps would show."""
    half = torch.bfloat16 if CUDA else torch.float16
    dtype = half if width == 512 else torch.float32
    lengths, nodes = ([130, 67], 26) if CUDA else ([20], 6)
    arguments = problem(lengths, nodes, heads=1, group=3, dk=width, dv=width, dtype=dtype)
    first = kernel(*arguments, width**-0.5, 0, 0.0, None)
    check(arguments, scale=width**-0.5, tolerance=2e-2 if dtype == half else 2e-5)
    for _ in range(50 if CUDA else 0):
        assert torch.equal(kernel(*arguments, width**-0.5, 0, 0.0, None), first)


@pytest.mark.parametrize("group", [3, 5])
def test_the_queries_of_a_node_may_stand_in_two_tiles(group):
    check(problem([37, 5], 26, heads=1, group=group))


@pytest.mark.parametrize("window", [1, 4, 33])
def test_a_window_counts_positions_and_not_slots(window):
    check(problem([90, 3], 12), window=window)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_a_chunk_counts_positions_and_not_slots(chunk_size):
    """The nodes of the first row stand on both sides of the edge of a chunk."""
    check(problem([62, 3], 12), chunk_size=chunk_size)


@pytest.mark.slow
def test_a_chunk_counts_positions_among_nodes_of_earlier_forwards_and_of_long_rows():
    check(problem([62, 3, 15], 20, new=4), chunk_size=16)
    check(problem([40, 0], 70, causal=True), chunk_size=33)
    check(problem([130, 7], 6), chunk_size=64)


@pytest.mark.slow
def test_softcap_sinks_and_padding():
    sinks = torch.randn(4, device=DEVICE)
    check(problem([50, 20], 6, padding=4), softcap=2.0)
    check(problem([50, 20], 6, padding=4), sinks=sinks)
    check(problem([50] * 70, 1, heads=2), sinks=sinks)  # so many rows that nothing is split


@pytest.mark.slow
def test_a_prompt_is_a_chain_longer_than_one_tile():
    check(problem([0, 30], 70, causal=True))


def test_many_rows_are_not_split():
    check(problem([20, 3] * 34, 3), window=5)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "new"), [(2, 1), (7, 3), (26, 5), (26, 25), (50, 10)])
@pytest.mark.parametrize("lengths", [[0], [1, 0, 40], [130, 67]])
def test_nodes_of_earlier_forwards_are_read_from_the_cache(lengths, nodes, new):
    check(problem(lengths, nodes, new=new))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 4, 33])
def test_a_window_counts_positions_among_nodes_of_earlier_forwards_too(window):
    check(problem([90, 3, 15], 20, new=4), window=window)
    check(problem([40, 0], 40, new=7, causal=True), window=window)


@pytest.mark.slow
def test_nodes_of_earlier_forwards_may_fill_several_tiles():
    check(problem([5, 30], 150, new=3, causal=True))
    check(problem([0, 30], 150, new=70), window=9)
    check(problem([14, 3] * 34, 20, new=2))  # so many rows that nothing is split


@pytest.mark.slow
def test_softcap_sinks_padding_and_widths_beside_nodes_of_earlier_forwards():
    check(problem([50, 20], 12, new=3, padding=2), softcap=2.0)
    check(problem([50, 20], 12, new=3, padding=2, heads=1, group=4, dk=24, dv=40), sinks=torch.randn(4, device=DEVICE))


@pytest.mark.parametrize("width", [16, 128])
def test_half_precision_beside_nodes_of_earlier_forwards(width):
    dtype = torch.bfloat16 if CUDA else torch.float16
    check(problem([130, 7], 60, new=6, group=4, dk=width, dv=width, dtype=dtype), scale=0.1, tolerance=3e-2)


def test_the_reference_reads_nodes_of_earlier_forwards_as_it_reads_new_ones():
    """Compare the reference with itself: the last nodes alone, once all are stored, and all nodes at once."""
    whole = on_cpu(problem([33, 0], 20))
    expected = tree_attention(*whole, 0.3, 5, 0.0, None).view(2, 20, 4, 16)
    last = on_cpu(problem([33, 0], 20, new=6))
    last[:3] = (x.view(2, 20, *x.shape[1:])[:, -6:].flatten(0, 1) for x in whole[:3])
    last[3:7] = whole[3:7]
    last[9], last[11] = whole[9], whole[11]
    last[10] = torch.cat([whole[10][:-1].view(2, 20, 20)[:, -6:].flatten(), whole[10][-1:]])
    assert_close_by_scale(tree_attention(*last, 0.3, 5, 0.0, None).view(2, 6, 4, 16), expected[:, -6:], 5e-6)


def test_half_precision():
    check(problem([130, 7], 26, dtype=torch.bfloat16 if CUDA else torch.float16), tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 128])
def test_prompts_in_half_precision_come_out_right_and_twice_the_same(width):
    """Use the largest tiles on a GPU: a race in a pipelined loop showed here and nowhere else."""
    rows, nodes = ([0, 300, 512, 40] * 8, 199) if CUDA else ([0, 20], 40)
    dtype = torch.bfloat16 if CUDA else torch.float16
    arguments = problem(rows, nodes, heads=2, group=4, dk=width, dv=width, dtype=dtype, causal=True)
    first = kernel(*arguments, 0.1, 0, 0.0, None)
    check(arguments, scale=0.1, tolerance=3e-2)
    for _ in range(5 if CUDA else 1):
        assert torch.equal(kernel(*arguments, 0.1, 0, 0.0, None), first)


def test_many_trees_are_attended_to_in_the_largest_tiles(monkeypatch):
    """Compare twice on a GPU, where a race in a pipelined loop would show."""
    if not CUDA:
        monkeypatch.setattr(import_module("redrafter.kernels.attention"), "TARGET_PROGRAMS", 2)
    dtype = torch.bfloat16 if CUDA else torch.float16
    arguments = problem([130, 67, 0, 300] * (20 if CUDA else 1), 26, heads=2, group=4, dtype=dtype)
    first = kernel(*arguments, 0.3, 0, 0.0, None)
    check(arguments, tolerance=2e-2)
    assert torch.equal(kernel(*arguments, 0.3, 0, 0.0, None), first)


@pytest.mark.skipif(not CUDA or torch.cuda.mem_get_info()[0] < 12 << 30, reason="needs a GPU with 12 GiB free")
def test_a_layer_may_have_more_numbers_than_32_bits_count():
    arguments = problem([300, 20], 26, heads=8, group=4, dk=128, dv=128, dtype=torch.bfloat16)
    expected = kernel(*arguments, 0.1, 0, 0.0, None)
    slots = (1 << 31) // (8 * 128)
    for pool in (3, 5):
        held = arguments[pool][arguments[pool + 1]]
        arguments[pool : pool + 2] = held.new_zeros(1, slots + len(held), 8, 128), 0
        arguments[pool][0, slots:] = held
    arguments[11] = arguments[11] + slots // BLOCK_SIZE
    assert torch.equal(kernel(*arguments, 0.1, 0, 0.0, None), expected)


def test_padding_comes_out_as_zero():
    arguments = problem([5], 3, padding=2)
    assert kernel(*arguments, 0.3, 0, 0.0, None)[3:].eq(0).all()


@pytest.mark.parametrize("held", [[1, 7, 3], [7, 7, 7], [1, 1, 1]])
@pytest.mark.parametrize("window", [0, 4])
def test_rows_of_a_ragged_tree_have_unequal_numbers_of_nodes(held, window):
    check(problem([1, 0, 40], 7, held=held), window=window)


@pytest.mark.parametrize(
    ("chunks", "room", "padding"),
    [([(0, 5)], 1, 3), ([(37, 20), (0, 9)], 4, 6), ([(3, 64)], 4, 0), ([(0, 1), (16, 1), (5, 40)], 4, 2), ([], 2, 0)],
)
@pytest.mark.parametrize("window", [0, 4])
def test_chunks_of_prompts_are_read_beside_trees(chunks, room, padding, window):
    check(problem([30, 2], 5, chunks=chunks, room=room, padding=padding), window=window)


def test_chunks_with_softcap_sinks_and_ragged_trees():
    arguments = dict(held=[4, 1], chunks=[(10, 30), (0, 3)], room=4, padding=7, heads=1, group=4)
    check(problem([30, 2], 5, **arguments), softcap=2.0, sinks=torch.randn(4, device=DEVICE))


@pytest.fixture
def few_tokens_are_many(monkeypatch):
    """Split rows as if contexts of some dozen tokens were long, and count the splits of each launch."""
    module, splits = import_module("redrafter.kernels.attention"), []
    choose = vars(module)["_for_long_rows"]
    monkeypatch.setattr(module, "LONG_CONTEXT_TOKENS", 64)
    monkeypatch.setattr(module, "MAX_SPLIT_TOKENS", 32)
    monkeypatch.setattr(module, "MIN_SPLIT_TOKENS", 64)
    monkeypatch.setattr(module, "TARGET_PROGRAMS", 2)
    monkeypatch.setattr(module, "_for_long_rows", lambda *how: splits.append(choose(*how)) or splits[-1])
    return splits


@pytest.mark.parametrize("how", [{}, {"window": 33}, {"softcap": 2.0}], ids=str)
def test_a_row_that_is_much_longer_than_others_has_splits_of_its_own(few_tokens_are_many, how):
    check(problem([300, 7, 0, 130], 5, padding=3), **how)
    assert few_tokens_are_many[0][2] > 9


@pytest.mark.parametrize("how", [{}, {"window": 33}, {"chunk_size": 40}], ids=str)
def test_a_short_chunk_behind_a_long_text_is_split(few_tokens_are_many, how):
    check(problem([30, 2], 5, chunks=[(290, 7), (0, 3), (70, 20)], room=4, padding=5), **how)
    assert few_tokens_are_many[-1][2] > 9


def test_what_splits_find_is_bounded(monkeypatch, few_tokens_are_many):
    arguments = problem([300, 7], 5)
    monkeypatch.setattr(import_module("redrafter.kernels.attention"), "MAX_PART_NUMBERS", 4 * 10 * 4 * 16)
    check(arguments)
    assert few_tokens_are_many[0][2] == 4


def test_a_row_alone_is_split_as_far_as_keeps_a_device_busy(few_tokens_are_many):
    check(problem([300], 5))
    assert not few_tokens_are_many


def test_chunks_in_half_precision():
    dtype = torch.bfloat16 if CUDA else torch.float16
    arguments = dict(chunks=[(100, 50), (0, 3)], room=4, dk=64, dv=64, dtype=dtype)
    check(problem([130, 7], 26, **arguments), scale=0.1, tolerance=3e-2)


def test_committing_equals_one_gather_and_scatter():
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(3, 20 * BLOCK_SIZE, 2, 40, generator=generator).to(DEVICE)
    table = (torch.randperm(19, generator=generator)[:12] + 1).view(3, 4).int().to(DEVICE)
    length = torch.tensor([0, 13, 30], device=DEVICE)
    nodes = torch.tensor([[0, 1, 2, 3, 0], [0, 2, 5, 9, 0], [0, 3, 0, 0, 0]], device=DEVICE)
    slots = lambda at: (table.gather(1, at // BLOCK_SIZE) * BLOCK_SIZE + at % BLOCK_SIZE).flatten()  # noqa: E731
    expected = pool.clone()
    to = length[:, None] + torch.arange(5, device=DEVICE)
    expected[:, slots(to)] = pool[:, slots(length[:, None] + nodes)]
    commit(pool, table, length, nodes)
    assert torch.equal(pool, expected)


def test_top_continuations_equal_the_reference():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 1, 50, 3), (1, 5, 2500, 5), (3, 4, 1024, 10), (1, 32, 1100, 32)
    for rows, beams, vocab, wide in shapes:
        scores = torch.randn(rows, beams, vocab, generator=generator).to(DEVICE)
        total = torch.randn(rows, beams, generator=generator).to(DEVICE)
        ids = None if rows == 1 else torch.randperm(9000, generator=generator)[:vocab]
        found = kernel_top_continuations(scores, total, wide, None if ids is None else ids.to(DEVICE))
        expected = [x.to(DEVICE) for x in top_continuations(scores.cpu(), total.cpu(), wide, ids)]
        assert torch.allclose(found[0], expected[0], atol=1e-5)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])


def test_no_continuation_is_likelier_than_its_beam():
    """A tree that is cut keeps the likeliest nodes, and must never keep one without the node that it hangs on."""
    generator = torch.Generator().manual_seed(1)
    certain = torch.full((64, 3, 200), -40.0)
    certain[:, :, 7] = 23.7 + torch.rand(64, 3, generator=generator)
    total = -30 * torch.rand(64, 3, generator=generator)
    score, source, _ = kernel_top_continuations(certain.to(DEVICE), total.to(DEVICE), 3, None)
    assert bool((score.cpu() <= total.gather(1, source.cpu())).all())


def test_a_nan_leads_to_no_id_past_the_vocabulary():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 0], logits[0, 1, 7:], logits[1, 2, 30] = torch.nan, torch.nan, torch.nan
    zeros = torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    ones, noise = torch.ones(2, device=DEVICE), torch.zeros(2, 1, 50, device=DEVICE)
    for optional_noise in (None, noise):
        assert torch.equal(kernels.sample_tokens(logits, ones, optional_noise, zeros), logits.argmax(-1))
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


@pytest.mark.parametrize("tokens, features, inner", [(1, 128, 1024), (5, 192, 512), (33, 64, 2048)])
def test_a_split_product_equals_that_of_torch(tokens, features, inner):
    generator = torch.Generator().manual_seed(tokens)
    dtype = torch.bfloat16 if CUDA else torch.float16
    x, weight = (torch.randn(n, inner, generator=generator).to(DEVICE, dtype) for n in (tokens, features))
    for _ in range(2):  # the counts are 0 again
        found = split_k_linear(x, weight)
        assert torch.allclose(found.float(), x.float() @ weight.float().T, atol=0.2, rtol=5e-3)


def test_sampling_equals_an_argmax_with_noise():
    generator = torch.Generator().manual_seed(0)
    for rows, nodes, vocab in ((1, 3, 50), (2, 5, 9000)):
        logits = torch.randn(rows, nodes, vocab, generator=generator).to(DEVICE)
        logits[:, 1, :40] = 7.0  # a tie is the first one's
        temperature = torch.rand(rows, generator=generator).to(DEVICE) + 0.5
        depth = torch.randint(0, 3, (rows, nodes), generator=generator).to(DEVICE)
        noise = torch.randn(rows, 3, vocab, generator=generator).to(DEVICE)
        assert torch.equal(kernels.sample_tokens(logits, temperature, None, depth), logits.argmax(-1))
        scores = logits / temperature[:, None, None] + noise.gather(1, depth[:, :, None].expand_as(logits))
        assert torch.equal(kernels.sample_tokens(logits, temperature, noise, depth), scores.argmax(-1))


def test_noise_equals_the_reference():
    seeds, positions = torch.tensor([3, 2**62 + 5]), torch.tensor([[0, 1, 900], [5, 6, 7]])
    expected = gumbel(seeds, positions, torch.arange(9000))
    found = kernels.gumbel(streams(seeds, positions).to(DEVICE), 9000).cpu()
    assert torch.allclose(found, expected, atol=2e-6, rtol=2e-6)


def test_no_module_hides_a_kernel_of_the_same_name():
    for module in pkgutil.iter_modules(kernels.__path__, "redrafter.kernels."):
        import_module(module.name)
    functions = [name for name in kernels.__all__ if not name.isupper()]
    assert all(callable(getattr(kernels, name)) for name in functions)
