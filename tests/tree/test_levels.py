"""The nodes of trees by level, in tensors whose sizes do not depend on the trees."""

import torch

from redrafter.tree.token_tree import Tree, chain, nodes_by_level, share_nodes, tree_of

PARENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 4], [0, 0, 1, 1, 1, 2, 3]])
DEPTH = torch.tensor([[0, 1, 1, 1, 2, 2, 3], [0, 1, 2, 2, 2, 3, 3]])


def tree(width: int = 3) -> Tree:
    return tree_of(torch.arange(14).view(2, 7), PARENTS, DEPTH, 3, width)


def nodes(levels: torch.Tensor, none: int) -> list[list[list[int]]]:
    """Return the nodes of each row at each level, without what stands for none."""
    return [[[node for node in row if node != none] for row in level] for level in levels.tolist()]


def test_each_level_has_its_nodes():
    levels = nodes_by_level(tree())
    assert levels.shape == (4, 2, 3)
    assert nodes(levels, 7) == [[[0], [0]], [[1, 2, 3], [1]], [[4, 5], [2, 3, 4]], [[6], [5, 6]]]


def test_a_wider_tree_has_more_room():
    levels = nodes_by_level(tree(width=5))
    assert levels.shape == (4, 2, 5)
    assert nodes(levels, 7) == nodes(nodes_by_level(tree()), 7)


def test_a_chain_has_a_node_a_level():
    assert nodes_by_level(chain(torch.zeros(2, 4, dtype=torch.long))).tolist() == [[[node]] * 2 for node in range(4)]


def test_of_the_last_level_alone_nodes_are_counted_from_its_first():
    assert nodes_by_level(tree().last_level(2)).tolist() == [[[1, 2, 2], [0, 1, 2]]]


def test_nodes_that_are_not_verified_are_none():
    score = torch.tensor([[0.0, -1, -9, -2, -3, -9, -4], [0.0, -9, -10, -10, -10, -11, -11]])
    shared = share_nodes(tree(), score, 6, torch.tensor([True, True]))
    assert shared.counts.tolist() == [5, 1]
    assert nodes(nodes_by_level(shared), 7) == [[[0], [0]], [[1, 2], []], [[3], []], [[4], []]]
