"""Attention in an order of positions: equal to the other reference, and the same bits however a token comes."""

import functools

import pytest
import torch

from helpers.attention import on_cpu, problem
from redrafter.attention import invariant_attention as order
from redrafter.attention.invariant_attention import invariant_attention
from redrafter.attention.prompt_chunks import PromptChunks
from redrafter.attention.tree_attention import tree_attention
from redrafter.cache.dense import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.tree.token_tree import chain, tree_of

HEADS, GROUP, WIDTH, VALUE_WIDTH = 2, 3, 16, 24


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


def random_text(length, dtype):
    """Return queries, keys and values of a text of `length` tokens."""
    generator = torch.Generator().manual_seed(5)
    shapes = (HEADS * GROUP, WIDTH), (HEADS, WIDTH), (HEADS, VALUE_WIDTH)
    return [torch.randn(length, *shape, generator=generator).to(dtype) for shape in shapes]


def empty_cache(length, dtype, rows=1):
    """Return a cache whose blocks are in no order."""
    blocks = length // BLOCK_SIZE + 4
    shapes = [LayerShape(HEADS, WIDTH, VALUE_WIDTH, dtype, torch.device("cpu"))]
    table = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(6)).view(rows, blocks) + 1
    return PagedCache(KVCachePool(shapes, rows * blocks + 1), table.int())


def attend(cache, tree, length, states, chunks=None, **settings):
    """Attend in the first layer of a cache with queries, keys and values of its new nodes."""
    plan = cache.plan(tree, torch.tensor(length), (0,), chunks, len(states[0]))
    settings = {"scale": 0.3, "window": 0, "softcap": 0.0, "sinks": None} | settings
    return invariant_attention(*states, *plan.pools[0], *plan.tensors, **settings)


def chain_of(count, rows=1):
    return chain(torch.zeros(rows, count, dtype=torch.long))


SETTINGS = {
    "plain": {},
    "window": {"window": 70},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 2, HEADS * GROUP)},
}
# More than a tile, than a split, and a length at which splits of other sizes begin.
LENGTHS = [3, 63, 64, 65, 300, 4100]
AS_CHAIN, AS_TREE, AS_CHUNK, AS_LAST_NODE, AMONG_ROWS = "chain", "tree", "chunk", "last node", "among rows"


def hold(cache, states):
    """Write keys and values of the first tokens of a text into the last row of a cache."""
    offsets = torch.arange(len(states[1]))
    slots = cache.table[-1].long()[offsets // BLOCK_SIZE] * BLOCK_SIZE + offsets % BLOCK_SIZE
    keys, key_layer, values, value_layer = cache.pool.layer_pools[0]
    keys[key_layer, slots], values[value_layer, slots] = states[1], states[2]


def come_as(form, states, n, **settings):
    """Return the output of the last five tokens of a text, which come behind n in some form."""
    dtype, last = states[0].dtype, [x[n:] for x in states]
    cache = empty_cache(n + 13, dtype, rows=2 if form == AMONG_ROWS else 1)
    if form == AS_CHUNK:
        first = max(n - 37, 0)  # of the chunk, behind what was read before
        hold(cache, [x[:first] for x in states])
        room = PromptChunks.room(1, cache.table.shape[1], torch.device("cpu"))
        room.starts[1], room.lengths[0], room.table[0] = n + 5 - first, first, cache.table[0]
        idle = PagedCache(cache.pool, torch.zeros_like(cache.table))
        return attend(idle, chain_of(1), [0], [torch.cat([x[:1], x[first:]]) for x in states], room, **settings)[-5:]
    hold(cache, [x[:n] for x in states])
    if form == AMONG_ROWS:
        states = [torch.cat([x[:5], y]) for x, y in zip(states, last, strict=True)]
        return attend(cache, chain_of(5, rows=2), [0, n], states, **settings)[5:]
    if form == AS_CHAIN:
        return attend(cache, chain_of(5), [n], last, **settings)
    if form == AS_LAST_NODE:  # of a chain whose other nodes were computed before
        before = attend(cache, chain_of(4), [n], [x[:4] for x in last], **settings)
        return torch.cat([before, attend(cache, chain_of(5).last(1), [n], [x[4:] for x in last], **settings)])
    parents, depth = torch.tensor([[0, 0, 0, 1, 2, 4, 5, 6]]), torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5]])
    path = [0, 2, 4, 5, 6]
    nodes = [torch.randn(8, *x.shape[1:], generator=torch.Generator().manual_seed(1)).to(dtype) for x in last]
    for x, y in zip(nodes, last, strict=True):
        x[path] = y
    return attend(cache, tree_of(torch.zeros(1, 8, dtype=torch.long), parents, depth, 5), [n], nodes, **settings)[path]


@functools.cache
def alone(n, dtype, setting):
    """Return the output of the last five tokens of a text, each the only new one of a forward."""
    states, cache = random_text(n + 5, dtype), empty_cache(n + 8, dtype)
    hold(cache, [x[:n] for x in states])
    steps = [
        attend(cache, chain_of(1), [s], [x[s : s + 1] for x in states], **SETTINGS[setting]) for s in range(n, n + 5)
    ]
    return torch.cat(steps)


@pytest.mark.parametrize("form", [AS_CHAIN, AS_TREE, AS_CHUNK, AS_LAST_NODE, AMONG_ROWS])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_token_has_the_same_bits_in_any_form(n, setting, form):
    states = random_text(n + 5, torch.float32)
    assert torch.equal(come_as(form, states, n, **SETTINGS[setting]), alone(n, torch.float32, setting))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [AS_TREE, AS_CHUNK])
def test_a_token_has_the_same_bits_in_any_form_in_half_precision(form, dtype):
    states = random_text(305, dtype)
    assert torch.equal(come_as(form, states, 300), alone(300, dtype, "plain"))


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
    states = random_text(305, torch.float32)
    expected = alone(300, torch.float32, "plain")
    monkeypatch.setattr(order, "splits", broken)
    assert not torch.equal(come_as(AS_CHAIN, states, 300), expected)


@pytest.mark.parametrize(("end", "count"), [(1, 1), (256, 1), (257, 2), (4096, 16), (4097, 17), (5121, 18)])
def test_splits_are_at_fixed_places(end, count):
    found = list(order.splits(end))
    assert [split.start for split in found] == [*range(0, 4096, 256), *range(4096, 8192, 1024)][:count]
    assert all(len(split) == (256 if split.start < 4096 else 1024) for split in found)


def test_what_is_in_slots_that_no_token_sees_changes_nothing():
    states = random_text(70, torch.float32)
    outputs = []
    for junk in (0.0, torch.nan):
        cache = empty_cache(80, torch.float32)
        for pool in cache.pool.pools:
            pool.fill_(junk)
        outputs.append(attend(cache, chain_of(70), [0], states))
    assert torch.equal(*outputs)
