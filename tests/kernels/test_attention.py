"""What attends to trees and chunks over a paged cache, compared with the reference of tree attention."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from helpers.attention import DEVICE, HALF, check_attention, on_cpu, pool_of, problem, tree_attention_reference
from helpers.models import assert_close_by_scale
from redrafter.attention.invariant_attention import invariant_attention_reference
from redrafter.kernels.attention import tree_attention
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import round_trip
from redrafter.kernels.ordered_attention import ordered_attention

module = import_module("redrafter.kernels.attention")
CUDA = DEVICE == "cuda"
FORMATS = E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Cut rows into few parts on a CPU, where the interpreter runs one program after the other."""
    if not CUDA:
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 12)


every = pytest.mark.parametrize("attend", [tree_attention, ordered_attention, invariant_attention_reference])


def each(*cases, slow=()):
    slow_cases = (pytest.param(how, marks=pytest.mark.slow) for how in slow)
    return pytest.mark.parametrize("how", [*cases, *slow_cases], ids=str)


def check(attend, how):
    check_attention(attend, problem(**how), 3e-2 if how.get("dtype", torch.float32).itemsize == 2 else 2e-5)


@every
@each(
    *(dict(lengths=lengths, nodes=7) for lengths in ([0], [1, 0, 40])),
    *(dict(lengths=lengths, nodes=1) for lengths in ([1, 0, 40], [130, 67], [700])),
    *(dict(lengths=[37, 5], nodes=9) | shape for shape in (dict(heads=1, group=4), dict(heads=3, group=1))),
    *(dict(lengths=[37, 5], nodes=9, dk=dk, dv=dv) for dk, dv in ((24, 16), (16, 40))),
    # The queries of a node stand in two tiles.
    *(dict(lengths=[37], nodes=nodes, heads=1, group=group) for nodes, group in ((26, 3), (14, 5), (3, 20))),
    # A window counts positions and not slots.
    *(dict(lengths=[90, 3], nodes=12, window=window) for window in (1, 4, 33)),
    *(dict(lengths=[50, 20], nodes=6, padding=4) | how for how in (dict(softcap=2.0), dict(sinks=True))),
    # Rows of a ragged tree have unequal numbers of nodes.
    *(dict(lengths=[1, 0, 40], nodes=7, held=held) for held in ([1, 7, 3], [7, 7, 7])),
    *(dict(lengths=[1, 0, 40], nodes=7, held=held, window=4) for held in ([1, 7, 3], [1, 1, 1])),
    *(dict(lengths=[1, 0, 70], nodes=1, kv_dtype=kv, dtype=d) for kv in FORMATS for d in (torch.float32, HALF)),
    slow=[
        *(dict(lengths=lengths, nodes=26) for lengths in ([0], [1, 0, 40], [130, 67])),
        *(dict(lengths=lengths, nodes=nodes) for lengths, nodes in (([0], 1), ([130, 67], 7), ([700], 7))),
        *(dict(lengths=[90, 3, 300], nodes=12, window=window) for window in (33, 90)),
        *(dict(lengths=[37, 5], nodes=26, heads=1, group=group) for group in (3, 5)),
        dict(lengths=[130, 7], nodes=26, dtype=HALF),
        dict(lengths=[20, 3] * 34, nodes=3, window=5),  # so many rows that nothing is split
        dict(lengths=[20, 3] * 34, nodes=3, window=5, kv_dtype=E4M3),
        dict(lengths=[50] * 70, nodes=1, sinks=True),
        dict(lengths=[0, 30], nodes=70, causal=True),  # a prompt that is longer than a tile
        dict(lengths=[5], nodes=300, heads=1, group=1, causal=True, window=20),
        *(dict(lengths=[1, 0, 70], nodes=26, kv_dtype=kv, dtype=d) for kv in FORMATS for d in (torch.float32, HALF)),
    ],
)
def test_trees_are_attended_to_as_by_the_reference(attend, how):
    check(attend, how)


@every
@each(
    dict(lengths=[90, 3, 15], nodes=20, new=4, window=4),
    dict(lengths=[50, 3], nodes=20, new=6, padding=2, kv_dtype=E4M3, window=9, softcap=2.0, sinks=True),
    *(dict(lengths=[130, 7], nodes=60, new=6, group=4, dk=d, dv=d, dtype=HALF, scale=0.1) for d in (16, 128)),
    slow=[
        *(dict(lengths=[1, 0, 40], nodes=n, new=new) for n, new in ((2, 1), (7, 3), (26, 5), (26, 25), (150, 10))),
        *(dict(lengths=lengths, nodes=50, new=10) for lengths in ([0], [130, 67])),
        *(dict(lengths=[90, 3, 15], nodes=20, new=4, window=window) for window in (1, 2, 33)),
        dict(lengths=[40, 0], nodes=40, new=7, causal=True, window=4),
        dict(lengths=[5, 30], nodes=150, new=3, causal=True),
        dict(lengths=[0, 30], nodes=150, new=70, window=9),
        dict(lengths=[14, 3] * 34, nodes=20, new=2),  # so many rows that nothing is split
        dict(lengths=[50, 20], nodes=12, new=3, padding=2, softcap=2.0),
        dict(lengths=[50, 20], nodes=12, new=3, padding=2, heads=1, group=4, dk=24, dv=40, sinks=True),
    ],
)
def test_nodes_of_earlier_forwards_are_read_from_the_cache(attend, how):
    check(attend, how)


@each(
    dict(lengths=[37, 5], nodes=9, window=6),
    dict(lengths=[37, 0], nodes=40, heads=1, group=4),  # in several tiles of queries and of keys
    slow=[dict(lengths=[130, 67], nodes=16, group=4, dk=128, dv=128, dtype=HALF, scale=0.1, window=33)],
)
def test_positions_of_a_block_see_later_ones_and_heads_are_a_part_of_a_store(how):
    inputs = problem(**how)
    stores = {name: getattr(inputs, name) for name in ("keys", "values")}
    heads, _ = inputs.heads
    wide = {name: torch.cat([x + 1, x, x - 1], dim=1) for name, x in stores.items()}
    part = {name: x[:, heads : 2 * heads] for name, x in wide.items()}
    before = {name: x.clone() for name, x in wide.items()}
    ancestors = torch.ones_like(inputs.rows.ancestors)
    both_ways = replace(inputs, rows=inputs.rows._replace(ancestors=ancestors))
    expected = tree_attention_reference(on_cpu(both_ways))
    found = tree_attention(replace(both_ways, sees_later=True, **part))
    tolerance = 3e-2 if found.itemsize == 2 else 2e-5
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=tolerance, rtol=tolerance)
    for name, x in wide.items():
        assert torch.equal(x[:, :heads], before[name][:, :heads])
        assert torch.equal(x[:, 2 * heads :], before[name][:, 2 * heads :])
        assert not torch.equal(x[:, heads : 2 * heads], before[name][:, heads : 2 * heads])  # the block is stored


CHUNKS = [(0, 5)], [(37, 20), (0, 9)], [(3, 64)], [(0, 1), (16, 1), (5, 40)], []


@every
@each(
    *(
        dict(lengths=[30, 2], nodes=5, chunks=chunks, room=4, padding=padding, window=window)
        for chunks, padding, window in zip(CHUNKS, (3, 6, 0, 2, 0), (0, 4, 4, 0, 4), strict=True)
    ),
    dict(lengths=[20], nodes=5, chunks=[(300, 20), (0, 9)], room=3, padding=3),
    dict(lengths=[30, 2], nodes=5, held=[4, 1], chunks=[(10, 30), (0, 3)], room=4, group=4, softcap=2.0, sinks=True),
    dict(lengths=[130, 7], nodes=26, chunks=[(100, 50), (0, 3)], room=4, dk=64, dv=64, dtype=HALF, scale=0.1),
    slow=[dict(lengths=[20, 3], nodes=6, chunks=[(33, 40), (0, 7)], room=3, kv_dtype=E4M3)],
)
def test_chunks_of_prompts_are_read_beside_trees(attend, how):
    check(attend, how)


@each(
    *(dict(lengths=[62, 3], nodes=12, chunk_size=size) for size in (1, 5, 64)),  # nodes on both sides of an edge
    slow=[
        dict(lengths=[62, 3, 15], nodes=20, new=4, chunk_size=16),
        dict(lengths=[40, 0], nodes=70, causal=True, chunk_size=33),
        dict(lengths=[130, 7], nodes=6, chunk_size=64),
    ],
)
def test_a_chunk_counts_positions_and_not_slots(how):
    check(tree_attention, how)


def test_the_reference_reads_nodes_of_earlier_forwards_as_it_reads_new_ones():
    """Compare the reference with itself: the last nodes alone, once all are stored, and all nodes at once."""
    whole = on_cpu(problem([33, 0], 20, window=5))
    expected = tree_attention_reference(whole).view(2, 20, 4, 16)
    last = on_cpu(problem([33, 0], 20, new=6, window=5))
    ancestors = torch.cat([whole.rows.by_row()[2][:, -6:].flatten(), last.rows.ancestors[-1:]])
    rows = last.rows._replace(depth=whole.rows.depth, table=whole.rows.table, ancestors=ancestors)
    query, key, value = (
        x.view(2, 20, *x.shape[1:])[:, -6:].flatten(0, 1) for x in (whole.query, whole.key, whole.value)
    )
    last = replace(whole, query=query, key=key, value=value, rows=rows)
    assert_close_by_scale(tree_attention_reference(last).view(2, 6, 4, 16), expected[:, -6:], 5e-6)


WIDE = {"heads": 1, "group": 3}
PROMPTS = {"heads": 2, "group": 4, "dtype": HALF, "causal": True, "scale": 0.1}


@each(
    *(dict(on_gpu=([130, 67], 26), here=([20], 6), dk=d, dv=d, scale=d**-0.5, **WIDE) for d in (128, 256)),
    dict(on_gpu=([130, 67], 26), here=([20], 6), dk=512, dv=512, scale=512**-0.5, dtype=HALF, **WIDE),
    dict(on_gpu=([130, 67, 0, 300] * 20, 26), here=([130, 67, 0, 300], 26), heads=2, group=4, dtype=HALF),
    slow=[
        dict(on_gpu=([0, 300, 512, 40] * 8, 199), here=([0, 20], 40), dk=d, dv=d, kv_dtype=kv, **PROMPTS)
        for d in (16, 128)
        for kv in (None, E4M3)
    ],
)
def test_large_tiles_come_out_right_and_every_time_the_same(how, monkeypatch):
    """Compare often on a GPU, where a race among warps or in a pipelined loop would show."""
    how = dict(how)
    sizes, small = how.pop("on_gpu"), how.pop("here")
    if not CUDA:
        monkeypatch.setattr(module, "TARGET_PROGRAMS", 2)  # as for many trees
    inputs = problem(*(sizes if CUDA else small), **how)
    first = tree_attention(inputs)
    check_attention(tree_attention, inputs, 3e-2 if first.itemsize == 2 else 2e-5)
    for _ in range(20 if CUDA else 1):
        assert torch.equal(tree_attention(inputs), first)


@pytest.mark.skipif(not CUDA or torch.cuda.mem_get_info()[0] < 12 << 30, reason="needs a GPU with 12 GiB free")
def test_a_layer_may_have_more_numbers_than_32_bits_count():
    inputs = problem([300, 20], 26, heads=8, group=4, dk=128, dv=128, dtype=torch.bfloat16, scale=0.1)
    expected, slots = tree_attention(inputs), (1 << 31) // (8 * 128)
    large = [torch.cat([held.new_zeros(slots, 8, 128), held]) for held in (inputs.keys, inputs.values)]
    rows = inputs.rows._replace(table=inputs.rows.table + slots // BLOCK_SIZE)
    assert torch.equal(tree_attention(replace(inputs, keys=large[0], values=large[1], rows=rows)), expected)


@pytest.fixture
def few_tokens_are_many(monkeypatch):
    """Split rows as if contexts of some dozen tokens were long, and count the splits of each launch."""
    splits, choose = [], vars(module)["_for_long_rows"]
    for name, value in {"LONG_CONTEXT_TOKENS": 64, "MAX_SPLIT_TOKENS": 32, "MIN_SPLIT_TOKENS": 64}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "TARGET_PROGRAMS", 2)
    monkeypatch.setattr(module, "_for_long_rows", lambda *how: splits.append(choose(*how).splits) or choose(*how))
    return splits


@each({}, {"window": 33}, {"softcap": 2.0})
def test_a_row_that_is_much_longer_than_others_has_splits_of_its_own(few_tokens_are_many, how):
    check(tree_attention, dict(lengths=[300, 7, 0, 130], nodes=5, padding=3, heads=1) | how)
    assert few_tokens_are_many[0] > 9


@each(*({}, {"window": 33}, {"chunk_size": 40}))
def test_a_short_chunk_after_a_long_text_is_split(few_tokens_are_many, how):
    chunks = [(290, 7), (0, 3), (70, 20)]
    check(tree_attention, dict(lengths=[30, 2], nodes=5, chunks=chunks, room=4, padding=5, heads=1, group=1) | how)
    assert few_tokens_are_many[-1] > 9


def test_what_splits_find_is_bounded(monkeypatch, few_tokens_are_many):
    monkeypatch.setattr(module, "MAX_PART_NUMBERS", 4 * 10 * 4 * 16)
    check(tree_attention, dict(lengths=[300, 7], nodes=5))
    assert few_tokens_are_many[0] == 4


def test_a_row_alone_is_split_as_far_as_keeps_a_device_busy(few_tokens_are_many):
    check(tree_attention, dict(lengths=[300], nodes=5))
    assert not few_tokens_are_many


@pytest.mark.parametrize("window", [0, 5])
def test_one_program_may_fold_all_splits_of_its_queries(monkeypatch, window):
    monkeypatch.setattr(import_module("redrafter.kernels.ordered_attention"), "TARGET_PROGRAMS", 1)
    check(ordered_attention, dict(lengths=[300, 3, 250, 126], nodes=9, heads=1, causal=True, window=window))


over_fp8 = pytest.mark.parametrize(
    "attend", [tree_attention, ordered_attention, tree_attention_reference, invariant_attention_reference]
)


@over_fp8
def test_nodes_see_each_other_as_they_will_be_read_back(attend):
    """Give keys and values once as they are and once rounded: nothing may tell them apart."""
    inputs = problem([20, 3], 9, kv_dtype=E4M3)
    rounded = replace(inputs, key=round_trip(inputs.key, E4M3), value=round_trip(inputs.value, E4M3))
    assert not torch.equal(rounded.key, inputs.key)
    assert torch.equal(attend(inputs), attend(rounded))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@over_fp8
def test_large_keys_and_values_stay_finite(attend, kv_dtype):
    inputs = problem([20], 5, kv_dtype=kv_dtype)
    large = replace(inputs, key=inputs.key * 1e6, value=inputs.value * 1e6)
    assert attend(large).isfinite().all()
    assert pool_of(large.keys).float().isfinite().all()
    assert pool_of(large.values).float().abs().max() == torch.finfo(kv_dtype).max


@every
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@each(
    dict(lengths=[37, 0], nodes=9, number=torch.nan),
    dict(lengths=[20], nodes=5, chunks=[(9, 20)], room=2, number=torch.inf),
    slow=[
        dict(lengths=[300, 5], nodes=9, window=40, number=torch.inf),  # committed tokens are split
        dict(lengths=[50, 3], nodes=9, softcap=2.0, sinks=True, group=4, dtype=HALF, number=-torch.inf),
        dict(lengths=[40], nodes=70, causal=True, number=torch.nan),
        dict(lengths=[20, 7] * 34, nodes=3, number=torch.inf),  # so many rows that nothing is split
    ],
)
def test_a_value_that_is_not_finite_reaches_no_token_that_does_not_see_it(attend, how):
    number, how = how["number"], {name: x for name, x in how.items() if name != "number"}
    inputs, expected = problem(**how), attend(problem(**how))
    _, depth, ancestors, _ = inputs.rows.by_row()
    sees = torch.zeros(len(expected), dtype=torch.bool, device=DEVICE)
    if "chunks" in how:
        token = 5 + 12
        sees[token : 5 + 20] = True
    else:
        token = 2
        near = depth[0] - depth[0, token] < how.get("window", 99)
        sees[: how["nodes"]] = ancestors[0, :, token] & near
    inputs.value[token, 0, 3] = number
    found, heads = attend(inputs), how.get("group", 2)  # query heads that share the key head
    assert torch.equal(found[~sees], expected[~sees])
    assert torch.equal(found[:, heads:], expected[:, heads:])
    assert not found[sees][:, :heads].isfinite().all(-1).any()


@every
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_stored_value_that_was_not_finite_reaches_no_node_that_does_not_see_it(attend):
    """A draft model grows its trees level by level, and reads the upper nodes from the cache."""
    whole, inputs, clean = problem([37], 20), problem([37], 20, new=4), problem([37], 20, new=4)
    ancestors, table = inputs.rows.by_row()[2][0], inputs.rows.by_row()[3][0]
    seen = ancestors[:, :16].sum(0)
    node = int(((seen > 0) & (seen < 4)).nonzero()[0])
    whole.value[node] = torch.nan
    attend(whole)
    slot = int(table[(37 + node) // BLOCK_SIZE]) * BLOCK_SIZE + (37 + node) % BLOCK_SIZE
    inputs.keys[slot], inputs.values[slot] = whole.keys[slot], whole.values[slot]
    clean.keys[slot], clean.values[slot] = problem([37], 20).keys[slot], 0
    found, expected, sees = attend(inputs), attend(clean), ancestors[:, node]
    assert torch.equal(found[~sees], expected[~sees])
    assert found[sees].isnan().all()
