"""The dense cache: where nodes are stored, what a commit moves, and how it grows."""

import pytest
import torch

from redrafter.cache.dense import WINDOW_STEP_SLOTS, DenseCache
from redrafter.cache.kv_cache import LayerShape

SHAPES = [
    LayerShape(2, 4, 4, torch.float32, torch.device("cpu")),
    LayerShape(1, 6, 3, torch.float32, torch.device("cpu")),  # keys and values of unequal width
]


def fill(cache, length, nodes, value):
    """Store `nodes` nodes whose every number encodes row, node and layer."""
    cache.write_after(length, nodes)
    for layer, shape in enumerate(SHAPES):
        tag = value + torch.arange(len(length))[:, None] * 100 + torch.arange(nodes)  # [B, N]
        tag = tag[:, None, :, None].float() + layer * 1000
        cache.update(
            tag.expand(-1, shape.heads, -1, shape.key_dim),
            tag.expand(-1, shape.heads, -1, shape.value_dim) + 0.5,
            layer,
        )


def column(cache, layer, row):
    """Return one number of each slot of a row, after a check that keys and values belong together."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    assert torch.equal(values[row, :, :, 0], torch.where(keys[row, :, :, 0] == 0, 0, keys[row, :, :, 0] + 0.5))
    return keys[row, 0, :, -1]


def reserved(slots):
    cache = DenseCache(SHAPES, 2)
    cache.reserve(slots)
    return cache


@pytest.mark.parametrize("layer", [0, 1])
def test_nodes_go_after_each_rows_own_length(layer):
    cache = reserved(20)
    fill(cache, torch.tensor([3, 7]), 4, 1)
    assert column(cache, layer, 0)[2:8].tolist() == [0, *(1000 * layer + i for i in (1, 2, 3, 4)), 0]
    assert column(cache, layer, 1)[7:11].tolist() == [1000 * layer + 100 + i for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("row", "path"), [(0, [0, 2, 5]), (1, [0, 4])])
def test_commit_moves_only_the_path_and_keeps_rows_apart(layer, row, path):
    cache, length = reserved(20), torch.tensor([3, 5])
    fill(cache, torch.tensor([0, 0]), 7, 900)  # committed tokens that must stay
    before, n = column(cache, layer, row).clone(), int(length[row])
    fill(cache, length, 6, 1)
    cache.commit(length, torch.tensor([[0, 2, 5], [0, 4, 0]]))  # the second row's path ends after two nodes
    after = column(cache, layer, row)
    assert torch.equal(after[:n], before[:n])
    assert after[n : n + len(path)].tolist() == [1000 * layer + 100 * row + 1 + node for node in path]


def test_growing_keeps_what_is_there_and_the_window_follows():
    cache = reserved(10)
    assert cache.window == WINDOW_STEP_SLOTS
    assert cache.get_mask_sizes(1, 0)[0] == WINDOW_STEP_SLOTS
    fill(cache, torch.tensor([2, 9]), 5, 1)
    kept = [column(cache, layer, row).clone() for layer in range(2) for row in range(2)]
    cache.reserve(3 * WINDOW_STEP_SLOTS + 1)
    assert cache.window == 4 * WINDOW_STEP_SLOTS
    grown = [column(cache, layer, row) for layer in range(2) for row in range(2)]
    for old, new in zip(kept, grown, strict=True):
        assert torch.equal(old, new[:WINDOW_STEP_SLOTS])
        assert not new[WINDOW_STEP_SLOTS:].any()
    cache.reserve(5)
    assert cache.window == WINDOW_STEP_SLOTS


def test_keys_of_an_indexer_are_stored_by_slot_and_committed_like_all_others():
    cache = DenseCache([LayerShape(2, 4, 4, torch.float32, torch.device("cpu"), extra_dim=3)], 2)
    cache.reserve(20)
    length = torch.tensor([3, 5])
    cache.write_after(length, 6)
    states = (1 + torch.arange(2)[:, None, None] * 100 + torch.arange(6)[:, None]).expand(2, 6, 3).float()
    stored = cache.update_indexer(states, 0)
    assert stored.shape == (2, WINDOW_STEP_SLOTS, 3)
    assert stored[1, :, 2].tolist() == [0] * 5 + [101, 102, 103, 104, 105, 106] + [0] * (WINDOW_STEP_SLOTS - 11)
    cache.commit(length, torch.tensor([[0, 2, 5], [0, 4, 4]]))
    assert stored[0, 3:6, 0].tolist() == [1, 3, 6]
    assert stored[1, 5:7, 0].tolist() == [101, 105]


@pytest.mark.parametrize("access", ["read", "grow", "commit", "copy", "many"])
def test_entries_that_are_written_later_are_there_before_they_are_read_or_moved(access):
    """Those of several forwards are computed in one call."""
    shape = LayerShape(1, 2, 2, torch.float32, torch.device("cpu"), of_drafter=True)
    cache, calls = DenseCache([shape], 2), list[int]()
    cache.reserve(20)

    def write(cache: DenseCache, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        calls.append(len(slots))
        cache.stores(-1)[0].index_copy_(0, slots, numbers[:, None, None].expand(-1, 1, 2))

    count = 64 if access == "many" else 3
    for number in range(count):
        cache.write_later(write, torch.tensor([number]), torch.tensor([1.0 + number]))
    assert calls == ([64] if access == "many" else [])
    if access == "grow":
        cache.reserve(10 * WINDOW_STEP_SLOTS)
    elif access == "commit":
        cache.commit(torch.tensor([0, 0]), torch.tensor([[0, 2], [0, 0]]))
    elif access == "copy":
        cache.write_rows([1], cache, [0])
    keys, _ = cache.read_drafter_layer(torch.arange(3)[None].expand(2, -1))
    assert calls == [count]
    assert keys[0, :, 0, 0].tolist() == ([1, 3, 3] if access == "commit" else [1, 2, 3])
    assert keys[1, :, 0, 0].tolist() == ([1, 2, 3] if access == "copy" else [0, 0, 0])


def test_entries_that_are_written_later_are_forgotten_with_their_rows():
    cache = DenseCache([LayerShape(1, 2, 2, torch.float32, torch.device("cpu"), of_drafter=True)], 1)
    cache.reserve(20)
    cache.write_later(lambda *_: pytest.fail("the row has ended"), torch.tensor([0]))
    cache.forget_later()
    assert not cache.read_drafter_layer(torch.tensor([[0]]))[0].any()
