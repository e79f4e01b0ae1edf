"""Kernels over keys and values in FP8, and the conversions of which they are made."""

import os
from functools import partial

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from helpers.attention import DEVICE, check_attention, on_cpu, problem
from redrafter.attention.invariant_attention import invariant_attention
from redrafter.attention.tree_attention import tree_attention
from redrafter.kernels import commit, ordered_attention
from redrafter.kernels import tree_attention as kernel
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.kernels.cache_format import as_bytes, read_slots, round_trip, to_format, write_slots

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter cannot multiply bfloat16
check = partial(check_attention, kernel)
check_ordered = partial(check_attention, ordered_attention)


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


@pytest.mark.parametrize("nodes", [1, pytest.param(26, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (HALF, 2e-2)])
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("checked", [check, check_ordered])
def test_kernels_equal_their_reference_on_uneven_rows(checked, kv_dtype, dtype, tolerance, nodes):
    checked(problem([1, 0, 70], nodes, dtype=dtype, kv_dtype=kv_dtype), tolerance=tolerance)


@pytest.mark.parametrize("checked", [check, check_ordered])
def test_nodes_of_earlier_forwards_and_windows_and_sinks(checked):
    sinks = torch.randn(4, device=DEVICE)
    arguments = problem([50, 3], 20, new=6, padding=2, kv_dtype=FORMATS[0])
    checked(arguments, window=9, softcap=2.0, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("checked", [check, check_ordered])
def test_chunks_beside_trees(checked):
    checked(problem([20, 3], 6, chunks=[(33, 40), (0, 7)], room=3, kv_dtype=FORMATS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("checked", [check, check_ordered])
def test_so_many_rows_that_nothing_is_split(checked):
    checked(problem([20, 3] * 34, 3, kv_dtype=FORMATS[0]), window=5)


@pytest.mark.parametrize("attend", [kernel, ordered_attention, tree_attention, invariant_attention])
def test_nodes_see_each_other_as_they_will_be_read_back(attend):
    """Give keys and values once as they are and once rounded: nothing may tell them apart."""
    arguments = problem([20, 3], 9, kv_dtype=FORMATS[0])
    rounded = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    rounded[1], rounded[2] = (round_trip(x, FORMATS[0]) for x in rounded[1:3])
    assert not torch.equal(rounded[1], arguments[1])
    whole, again = (attend(*each, 0.3, 0, 0.0, None) for each in (arguments, rounded))
    assert torch.equal(whole, again)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("attend", [kernel, ordered_attention, tree_attention, invariant_attention])
def test_large_keys_and_values_stay_finite(attend, kv_dtype):
    arguments = problem([20], 5, kv_dtype=kv_dtype)
    arguments[1], arguments[2] = arguments[1] * 1e6, arguments[2] * 1e6
    assert attend(*arguments, 0.3, 0, 0.0, None).isfinite().all()
    assert arguments[3].float().isfinite().all()
    assert arguments[5].float().abs().max() == torch.finfo(kv_dtype).max


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_commit_moves_bytes(kv_dtype):
    pool = to_format(torch.randn(2, 6 * BLOCK_SIZE, 2, 24, generator=torch.Generator().manual_seed(3)), kv_dtype)
    table = torch.tensor([[2, 4], [5, 1]], dtype=torch.int32)
    length, nodes = torch.tensor([12, 3]), torch.tensor([[0, 3, 7], [0, 1, 1]])
    moved = pool.to(DEVICE)
    commit(moved, table.to(DEVICE), length.to(DEVICE), nodes.to(DEVICE))
    slot = lambda row, at: int(table[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE  # noqa: E731
    expected = as_bytes(pool).clone()
    for row in range(2):
        for depth, node in enumerate(nodes[row].tolist()):
            expected[:, slot(row, int(length[row]) + depth)] = as_bytes(pool)[:, slot(row, int(length[row]) + node)]
    assert torch.equal(as_bytes(moved).cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 128])
def test_prompts_come_out_right_and_twice_the_same(width):
    """Use the largest tiles on a GPU, where a race in a pipelined loop would show."""
    rows, nodes = ([0, 300, 512, 40] * 8, 199) if CUDA else ([0, 20], 40)
    shape = dict(heads=2, group=4, dk=width, dv=width, dtype=HALF, causal=True)
    arguments = problem(rows, nodes, **shape, kv_dtype=FORMATS[0])
    first = kernel(*arguments, 0.1, 0, 0.0, None)
    check(arguments, scale=0.1, tolerance=3e-2)
    for _ in range(5 if CUDA else 1):
        assert torch.equal(kernel(*arguments, 0.1, 0, 0.0, None), first)


def test_the_references_agree_on_fp8():
    arguments = on_cpu(problem([33, 0], 20, kv_dtype=FORMATS[0]))
    other = on_cpu(arguments)
    a, b = tree_attention(*arguments, 0.3, 5, 0.0, None), invariant_attention(*other, 0.3, 5, 0.0, None)
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
