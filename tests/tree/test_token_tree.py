"""Token trees: ancestors, chains, and the choice of the best nodes."""

import pytest
import torch

from redrafter.errors import ArgumentError
from redrafter.tree.token_tree import chain, check_size, keep_best, tree_of


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
    kept = keep_best(tokens, parents, depth, score, 3)
    assert [x.tolist() for x in kept] == [[[9, 2, 4]], [[0, 0, 1]], [[0, 1, 2]], [[0, 2, 4]]]


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "5", None, 10**20])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ArgumentError, match="draft_len must be a positive integer"):
        check_size("draft_len", value)


def test_sizes_that_no_tree_has_are_refused():
    with pytest.raises(ArgumentError, match="num_beams must be at most 1024, got 1025"):
        check_size("num_beams", 1025)
    check_size("draft_len", 1024)
    check_size("node_budget", 1024**2)
