"""Drafts attend to stored entries in blocks as plain attention over copies of them does."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from redrafter import kernels
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.drafting import paged_entries
from redrafter.drafting.paged_entries import PagedEntries, with_themselves
from redrafter.kernels.attention_inputs import AttentionInputs
from redrafter.kernels.block_size import BLOCK_SIZE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, SIZE, BLOCKS = 2, 2, 16, 3


def kernel(*arguments: object) -> Tensor:
    return kernels.attention.tree_attention(AttentionInputs.from_arguments(*arguments))


@pytest.fixture(params=["kernel", "operator"])
def attending(request, monkeypatch):
    """Attend by the Triton kernel itself, and by the operator, which on a CPU is the reference."""
    if request.param == "kernel":
        if DEVICE == "cpu":  # fewer programs, of which the interpreter runs one after the other
            monkeypatch.setattr(import_module("redrafter.kernels.attention"), "TARGET_PROGRAMS", 12)
        monkeypatch.setattr(paged_entries, "tree_attention", kernel)


def cache_of(rows: int, dtype: torch.dtype = torch.float32) -> PagedCache:
    """Return a cache of random numbers, in shuffled blocks, of a model of one layer and a drafter's."""
    shapes = [LayerShape(HEADS, SIZE, SIZE, dtype, torch.device(DEVICE), of_drafter=drafts) for drafts in (False, True)]
    pool = KVCachePool(shapes, 1 + rows * BLOCKS)
    for tensor in pool.pools:
        tensor.copy_(torch.randn(tensor.shape))
    return PagedCache(pool, (torch.randperm(rows * BLOCKS) + 1).view(rows, BLOCKS).int().to(DEVICE))


def plain(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attend from `[w, h, d]` to `[S, H, d]`, where `visible` `[w, S]` says so."""
    keys, values = (x.repeat_interleave(GROUP, dim=1) for x in (keys, values))
    scores = torch.einsum("whd,shd->hws", query, keys) * SIZE**-0.5
    return torch.einsum("hws,shd->whd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("lengths", [[1, 17, 30], [2]])
def test_beams_attend_to_committed_tokens_and_to_their_own_paths(first, lengths, attending):
    torch.manual_seed(3)
    rows, width = len(lengths), 3
    cache, length = cache_of(rows), torch.tensor(lengths, device=DEVICE)
    entries = PagedEntries.from_cache(cache, length, first=first)
    stored = [store.clone() for store in cache.stores(-1)[:2]]
    path, drafted = None, [torch.empty(rows, 0, HEADS, SIZE, device=DEVICE) for _ in range(2)]
    for beams in (1, width, width):
        query = torch.randn(rows, beams, HEADS * GROUP, SIZE, device=DEVICE)
        new = [torch.randn(rows, beams, HEADS, SIZE, device=DEVICE) for _ in range(2)]
        if path is not None:  # each beam continues any beam before it
            sources = torch.randint(0, path.shape[1], (rows, beams), device=DEVICE)
            path = torch.stack([path[row, sources[row]] for row in range(rows)])
        path = with_themselves(path, rows, beams, length.device)
        drafted = [torch.cat(pair, dim=1) for pair in zip(drafted, new, strict=True)]
        found = entries.attend(query, *new, entries.rows(path))
        for row, n in enumerate(lengths):
            slots = cache.slots(torch.arange(first, n, device=DEVICE)[None].expand(rows, -1)).view(rows, -1)[row]
            keys, values = (torch.cat([s[slots], x[row]]) for s, x in zip(stored, drafted, strict=True))
            visible = torch.cat([path.new_ones(beams, n - first), path[row]], dim=1)
            expected = plain(query[row], keys, values, visible)
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=2e-5)


def test_committed_entries_are_neither_copied_nor_changed(attending):
    torch.manual_seed(4)
    cache, length = cache_of(2), torch.tensor([5, 20], device=DEVICE)
    before = [pool.clone() for pool in cache.pools]
    entries = PagedEntries.from_cache(cache, length)
    entries = entries._replace(keys=entries.keys[:, :, 1:2], values=entries.values[:, :, 1:2])
    assert entries.keys.untyped_storage().data_ptr() == cache.stores(-1)[0].untyped_storage().data_ptr()
    one = torch.randn(2, 1, 1, SIZE, device=DEVICE)
    rows = entries.rows(with_themselves(None, 2, 1, length.device))
    entries.attend(torch.randn(2, 1, GROUP, SIZE, device=DEVICE), one, one, rows)
    written = cache.slots(length[:, None])
    for pool, old in zip(cache.pools, before, strict=True):
        changed = (pool != old).any(-1)  # [layers, slots, heads]
        assert changed.nonzero().tolist() == sorted([layer, slot, 1] for layer in (2, 3) for slot in written.tolist())


def test_a_window_is_counted_from_the_depth_of_a_node(attending):
    torch.manual_seed(5)
    cache, n, window = cache_of(1), 2 * BLOCK_SIZE, 4
    entries = PagedEntries.from_cache(cache, torch.tensor([n], device=DEVICE))
    query = torch.randn(1, 2, HEADS * GROUP, SIZE, device=DEVICE)
    key, value = (torch.randn(1, 2, HEADS, SIZE, device=DEVICE) for _ in range(2))
    seen = torch.tensor([[[True, False], [True, True]]], device=DEVICE)
    slots = cache.slots(torch.arange(n, device=DEVICE)[None])
    keys, values = (torch.cat([s[slots], x[0]]) for s, x in zip(cache.stores(-1), (key, value), strict=False))
    visible = torch.cat([torch.zeros(2, n, dtype=torch.bool, device=DEVICE), seen[0]], dim=1)
    visible[0, n - 3 :], visible[1, n - 2 :] = True, True
    visible[0, n + 1] = False
    rows = entries.rows(seen, torch.tensor([[0, 1]], device=DEVICE))
    found = entries.attend(query, key, value, rows, window=window)
    torch.testing.assert_close(found[0], plain(query[0], keys, values, visible), atol=2e-5, rtol=2e-5)
