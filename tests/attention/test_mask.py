"""Masks of token trees are what their definition says, node by node and slot by slot."""

import pytest
import torch

from redrafter.attention.mask import AttentionKind, TreeSlots, additive_mask
from redrafter.tree.token_tree import tree_of

PARENTS, DEPTH = [0, 0, 0, 1, 2, 4], [0, 1, 1, 2, 2, 3]
SLOTS = 24
LENGTHS = [0, 3, 8, 15]  # committed tokens of each row


def seen_by_definition(length, kind):
    """Return what each node sees, `[6, SLOTS]` bool, from the definition: node by node and slot by slot."""
    seen = torch.zeros(6, SLOTS, dtype=torch.bool)
    for node in range(6):
        line, up = {node}, node
        while up:
            up = PARENTS[up]
            line.add(up)
        at = length + DEPTH[node]
        for slot in range(SLOTS):
            if slot >= length and slot - length not in line:
                continue
            position = slot if slot < length else length + DEPTH[slot - length]
            near = kind.window is None or at - position < kind.window
            same = kind.chunk is None or at // kind.chunk == position // kind.chunk
            seen[node, slot] = near and same
    return seen


def small_tree(rows):
    return tree_of(
        torch.zeros(rows, 6, dtype=torch.long),
        torch.tensor(PARENTS).expand(rows, 6),
        torch.tensor(DEPTH).expand(rows, 6),
        3,
    )


@pytest.mark.parametrize("row", range(len(LENGTHS)))
@pytest.mark.parametrize("kind", [AttentionKind(), *(AttentionKind(window=n) for n in (4, 1)), AttentionKind(chunk=5)])
def test_visibility_is_what_the_definition_says(kind, row):
    tree = small_tree(len(LENGTHS))
    visible = TreeSlots(torch.tensor(LENGTHS), tree.depth, tree.ancestors, SLOTS).seen(kind)
    assert torch.equal(visible[row], seen_by_definition(LENGTHS[row], kind))


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("kind", [AttentionKind(), *(AttentionKind(window=n) for n in (2, 4)), AttentionKind(chunk=5)])
def test_the_last_nodes_see_what_they_see_in_the_whole_tree(kind, count):
    lengths, whole = torch.tensor(LENGTHS), small_tree(len(LENGTHS))
    tree = whole.last_level(count)
    expected = TreeSlots(lengths, whole.depth, whole.ancestors, SLOTS).seen(kind)[:, -count:]
    assert tree.new == count
    assert torch.equal(TreeSlots(lengths, tree.depth, tree.ancestors, SLOTS).seen(kind), expected)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_each_slot_stands_at_the_position_of_what_it_holds(row):
    tree, length = small_tree(len(LENGTHS)), LENGTHS[row]
    positions = TreeSlots(torch.tensor(LENGTHS), tree.depth, tree.ancestors, SLOTS).positions[row]
    assert positions[: length + 6].tolist() == [*range(length), *(length + depth for depth in DEPTH)]


def test_the_mask_is_an_additive_float():
    mask = additive_mask(torch.tensor([[[True, False]]]), torch.bfloat16)
    assert mask.shape == (1, 1, 1, 2)
    assert mask.dtype == torch.bfloat16
    assert mask.flatten().tolist() == [0.0, torch.finfo(torch.bfloat16).min]
