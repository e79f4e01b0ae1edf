"""Token trees: ancestors, chains, and the choice of the best nodes."""

import pytest
import torch

from redrafter.errors import ArgumentError
from redrafter.tree.sizes import check_size
from redrafter.tree.token_tree import (
    Tree,
    chain,
    eligible_scores,
    hold_best,
    nodes_by_level,
    share_nodes,
    tree_of,
)


@pytest.mark.parametrize("nodes", [1, 2, 7, 30])
def test_ancestors_are_the_closure_of_parents(nodes):
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([[0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)]])
    depth = torch.zeros(1, nodes, dtype=torch.long)
    for i in range(1, nodes):
        depth[0, i] = depth[0, parents[0, i]] + 1
    tree = tree_of(torch.zeros(1, nodes, dtype=torch.long), parents, depth, int(depth.max()))
    for i in range(nodes):
        above, j = {i}, i
        while j != 0:
            j = parents[0, j].item()
            above.add(j)
        assert set(tree.ancestors[0, i].nonzero().flatten().tolist()) == above


def test_a_chain_sees_itself_and_what_came_before():
    tree = chain(torch.tensor([[4, 5, 6]]))
    assert tree.depth.tolist() == [[0, 1, 2]]
    assert tree.parents.tolist() == [[0, 0, 1]]
    assert torch.equal(tree.ancestors[0], torch.ones(3, 3).tril().bool())


def test_keeping_the_best_nodes_renumbers_parents():
    tokens = torch.tensor([[9, 1, 2, 3, 4]])
    parents, depth = torch.tensor([[0, 0, 0, 1, 2]]), torch.tensor([[0, 1, 1, 2, 2]])
    score = torch.tensor([[0.0, -3.0, -1.0, -4.0, -2.0]])
    *kept, counts = hold_best(tokens, parents, depth, score, 3, by_row=True)
    assert [x.tolist() for x in kept] == [[[9, 2, 4]], [[0, 0, 1]], [[0, 1, 2]], [[0, 2, 4]]]
    assert counts.tolist() == [3]


def random_trees(rows: int, nodes: int) -> tuple[Tree, torch.Tensor]:
    """Return trees with distinct tokens, and scores of their nodes that are never higher than the parent's."""
    generator = torch.Generator().manual_seed(rows)
    parents, depth = torch.zeros(2, rows, nodes, dtype=torch.long)
    score = torch.zeros(rows, nodes)
    for node in range(1, nodes):
        parents[:, node] = torch.randint((node - 1) // 2, node, (rows,), generator=generator)
        depth[:, node] = depth.gather(1, parents[:, node, None])[:, 0] + 1
        drop = torch.randint(0, 3, (rows,), generator=generator)  # ties between parent and child are frequent
        score[:, node] = score.gather(1, parents[:, node, None])[:, 0] - drop
    return tree_of(torch.arange(rows * nodes).view(rows, nodes), parents, depth, int(depth.max())), score


@pytest.mark.parametrize("total", [4, 5, 11, 39, 40])
def test_rows_share_the_nodes_of_highest_score(total):
    tree, score = random_trees(4, 10)
    shared = share_nodes(tree, eligible_scores(score.clone(), torch.ones(4, dtype=torch.bool)[:, None]), total)
    assert shared.counts is not None
    assert shared.counts.sum() == shared.total == shared.size == total
    assert shared.counts.min() >= 1
    verified = [row[:count] for row, count in zip(shared.tokens.tolist(), shared.counts.tolist(), strict=True)]
    chosen = torch.tensor([token for row in verified for token in row])
    left_out = torch.ones(40, dtype=torch.bool).index_fill(0, chosen, False)
    drafts = chosen[chosen % 10 != 0]
    if len(drafts) and left_out.any():
        assert score.flatten()[drafts].min() >= score.flatten()[left_out].max()
    for row, tokens in enumerate(verified):
        assert tokens[0] == 10 * row
        for node, token in enumerate(tokens):  # the parent is verified too, and comes before
            parent = 10 * row + int(tree.parents[row, token % 10])
            assert tokens[int(shared.parents[row, node])] == parent
            assert tokens.index(parent) <= node
            assert int(shared.depth[row, node]) == int(tree.depth[row, token % 10])


def test_rows_that_take_no_drafts_leave_their_nodes_to_others():
    tree, score = random_trees(3, 8)
    shared = share_nodes(tree, eligible_scores(score, torch.tensor([False, True, False])[:, None]), 10)
    assert shared.counts is not None
    assert shared.counts.tolist() == [1, 8, 1]


def test_scores_that_are_no_numbers_take_no_root_away():
    tree, score = random_trees(3, 8)
    score[1, 1:] = torch.nan
    shared = share_nodes(tree, eligible_scores(score, torch.ones(3, dtype=torch.bool)[:, None]), 12)
    assert shared.counts is not None
    assert shared.counts.tolist()[1] == 1
    assert shared.tokens[:, 0].tolist() == [0, 8, 16]


def test_a_chain_stays_a_chain_when_rows_share_nodes():
    tokens = torch.arange(8).view(2, 4)
    score = torch.tensor([[0.0, -0.1, -0.2, -5.0], [0.0, -3.0, -4.0, -6.0]])
    shared = share_nodes(chain(tokens), eligible_scores(score, torch.ones(2, dtype=torch.bool)[:, None]), 5)
    assert shared.counts is not None
    assert shared.counts.tolist() == [3, 2]
    assert not shared.branches
    assert torch.equal(shared.tokens, tokens)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "5", None, 10**20])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ArgumentError, match="draft_len must be a positive integer"):
        check_size("draft_len", value)


def test_sizes_that_no_tree_has_are_refused():
    with pytest.raises(ArgumentError, match="num_beams must be at most 1024, got 1025"):
        check_size("num_beams", 1025)
    check_size("draft_len", 1024)
    check_size("node_budget", 1024**2)


# The nodes by level, in tensors whose sizes do not depend on the trees.

PARENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 4], [0, 0, 1, 1, 1, 2, 3]])
DEPTH = torch.tensor([[0, 1, 1, 1, 2, 2, 3], [0, 1, 2, 2, 2, 3, 3]])


def leveled(width: int = 3) -> Tree:
    return tree_of(torch.arange(14).view(2, 7), PARENTS, DEPTH, 3, width)


def nodes(levels: torch.Tensor, none: int) -> list[list[list[int]]]:
    """Return the nodes of each row at each level, without what stands for none."""
    return [[[node for node in row if node != none] for row in level] for level in levels.tolist()]


@pytest.mark.parametrize("width", [3, 5])  # a wider tree has more room
def test_each_level_has_its_nodes(width):
    levels = nodes_by_level(leveled(width))
    assert levels.shape == (4, 2, width)
    assert nodes(levels, 7) == [[[0], [0]], [[1, 2, 3], [1]], [[4, 5], [2, 3, 4]], [[6], [5, 6]]]


def test_a_chain_has_a_node_a_level():
    assert nodes_by_level(chain(torch.zeros(2, 4, dtype=torch.long))).tolist() == [[[node]] * 2 for node in range(4)]


def test_of_the_last_level_alone_nodes_are_counted_from_its_first():
    assert nodes_by_level(leveled().last_level(2)).tolist() == [[[1, 2, 2], [0, 1, 2]]]


def test_nodes_that_are_not_verified_are_none():
    score = torch.tensor([[0.0, -1, -9, -2, -3, -9, -4], [0.0, -9, -10, -10, -10, -11, -11]])
    shared = share_nodes(leveled(), eligible_scores(score, torch.tensor([True, True])[:, None]), 6)
    assert shared.counts.tolist() == [5, 1]
    assert nodes(nodes_by_level(shared), 7) == [[[0], [0]], [[1, 2], []], [[3], []], [[4], []]]
