"""Attention in an order of positions: equal to the other reference, and the same bits however a token comes."""

import pytest
import torch

from helpers.attention import on_cpu, problem
from helpers.token_forms import AS_CHAIN, AS_CHUNK, AS_TREE, FORMS, SETTINGS, TokenForms
from redrafter.attention import invariant_attention as order
from redrafter.attention.invariant_attention import invariant_attention
from redrafter.attention.tree_attention import tree_attention
from redrafter.kernels.block_size import BLOCK_SIZE


def check(arguments, *, window=0, softcap=0.0, sinks=None, tolerance=2e-5):
    """Fail unless both references write the same cache and return nearly the same."""
    arguments = on_cpu(arguments)
    other = on_cpu(arguments)
    expected = tree_attention(*other, 0.3, window, softcap, sinks)
    found = invariant_attention(*arguments, 0.3, window, softcap, sinks)
    for pool in (3, 5):
        assert torch.equal(arguments[pool][:, BLOCK_SIZE:], other[pool][:, BLOCK_SIZE:])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("nodes", [1, 7, 26])
@pytest.mark.parametrize("lengths", [[0], [1, 0, 40], [130, 67], [700]])
def test_it_equals_the_other_reference_on_uneven_rows(lengths, nodes):
    check(problem(lengths, nodes))


@pytest.mark.parametrize(
    "shape", [dict(heads=1, group=4), dict(heads=3, group=1), dict(dk=24, dv=16), dict(dk=16, dv=40)]
)
def test_heads_and_widths_of_any_shape(shape):
    check(problem([37, 5], 9, **shape))


@pytest.mark.parametrize("window", [1, 4, 33, 90])
def test_a_window_counts_positions_and_not_slots(window):
    check(problem([90, 3, 400], 12), window=window)
    check(problem([90, 3, 15], 20, new=4), window=window)


@pytest.mark.parametrize(("nodes", "new"), [(2, 1), (7, 3), (26, 5), (150, 10)])
def test_nodes_of_earlier_forwards_are_read_from_the_cache(nodes, new):
    check(problem([1, 0, 40], nodes, new=new))


def test_softcap_sinks_and_padding():
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0))
    check(problem([50, 20], 6, padding=4), softcap=2.0)
    check(problem([50, 20], 6, padding=4), sinks=sinks)
    check(problem([50, 0], 12, new=3, padding=2), softcap=2.0, sinks=sinks, window=7)


@pytest.mark.parametrize("held", [[1, 7, 3], [7, 7, 7], [1, 1, 1]])
def test_rows_of_a_ragged_tree_have_unequal_numbers_of_nodes(held):
    check(problem([1, 0, 40], 7, held=held), window=4)


@pytest.mark.parametrize(
    ("chunks", "room", "padding"),
    [([(0, 5)], 1, 3), ([(37, 20), (0, 9)], 4, 6), ([(3, 64)], 4, 0), ([(0, 1), (16, 1), (5, 40)], 4, 2), ([], 2, 0)],
)
def test_chunks_of_prompts_are_read_beside_trees(chunks, room, padding):
    check(problem([30, 2], 5, chunks=chunks, room=room, padding=padding), window=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check(problem([130, 7], 26, dtype=dtype, chunks=[(100, 50)], room=1), tolerance=3e-2)


REFERENCE = TokenForms(invariant_attention, torch.device("cpu"))
# More than a tile, than a split, and a length at which splits of other sizes begin.
LENGTHS = [3, 63, 64, 65, 300, 4100]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_token_has_the_same_bits_in_any_form(n, setting, form):
    states = REFERENCE.random_text(n + 5, torch.float32)
    assert torch.equal(
        REFERENCE.come_as(form, states, n, **SETTINGS[setting]), REFERENCE.alone(n, torch.float32, setting)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [AS_TREE, AS_CHUNK])
def test_a_token_has_the_same_bits_in_any_form_in_half_precision(form, dtype):
    states = REFERENCE.random_text(305, dtype)
    assert torch.equal(REFERENCE.come_as(form, states, 300), REFERENCE.alone(300, dtype, "plain"))


def by_length(end):
    """Cut the positions into two halves, as a kernel may that has a device to fill."""
    half = end // 2 // 64 * 64
    return iter([range(half), range(half, end + 64)])


def with_tiles_reversed(end):
    """Yield one split a tile, the last one first."""
    return (range(first, first + 64) for first in reversed(range(0, end, 64)))


@pytest.mark.parametrize("broken", [by_length, with_tiles_reversed])
def test_an_order_that_follows_from_the_length_is_seen(monkeypatch, broken):
    """Guard the tests above, which compare tokens with the same number of positions before them."""
    states = REFERENCE.random_text(305, torch.float32)
    expected = REFERENCE.alone(300, torch.float32, "plain")
    monkeypatch.setattr(order, "splits", broken)
    assert not torch.equal(REFERENCE.come_as(AS_CHAIN, states, 300), expected)


@pytest.mark.parametrize(("end", "count"), [(1, 1), (128, 1), (129, 2), (4096, 32), (4097, 33), (4609, 34)])
def test_splits_are_at_fixed_places(end, count):
    found = list(order.splits(end))
    assert [split.start for split in found] == [*range(0, 4096, 128), *range(4096, 8192, 512)][:count]
    assert all(len(split) == (128 if split.start < 4096 else 512) for split in found)


def test_what_is_in_slots_that_no_token_sees_changes_nothing():
    states = REFERENCE.random_text(70, torch.float32)
    outputs = []
    for junk in (0.0, torch.nan):
        cache = REFERENCE.empty_cache(80, torch.float32)
        for pool in cache.pool.pools:
            pool.fill_(junk)
        outputs.append(REFERENCE.attend(cache, REFERENCE.chain_of(70), [0], states))
    assert torch.equal(*outputs)
