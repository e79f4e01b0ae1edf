"""Beam search, against the same search with lists."""

import pytest
import torch
from torch import Tensor

from redrafter.tree.beam_search import beam_search

V = 11


def table_search(seed: int, rows: int, beams: int, depth: int, nodes: int):
    """Search a random bigram table; return the tree and the table's log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V, V, generator=generator) * 2
    root = torch.randint(0, V, (rows,), generator=generator)
    tree = beam_search(root, lambda k, tokens, sources: table[tokens], beams=beams, depth=depth, nodes=nodes)
    return tree, table.log_softmax(-1)


def path_of(tree, row, node):
    """Return the nodes from the root down to a node."""
    path = [node]
    while path[-1] != 0:
        path.append(tree.parents[row, path[-1]].item())
    return path[::-1]


def slow_search(table, root, beams, depth):
    """Do the same search with lists; return every selected pair of every step, as a token path with its score."""
    live, lattice = [((root,), 0.0)], [((root,), 0.0)]
    for _ in range(depth):
        grown = [((*p, t), s + table[p[-1], t].item()) for p, s in live for t in range(V)]
        live = sorted(grown, key=lambda x: -x[1])[:beams]
        lattice += live
    return lattice


def texts_of(tree, row, nodes):
    """Return the tokens from the root down to each of the first nodes of a row."""
    return {tuple(tree.tokens[row, path_of(tree, row, node)].tolist()) for node in range(nodes)}


@pytest.mark.parametrize("row", range(3))
def test_the_lattice_holds_every_pair_that_the_search_selected(row):
    tree, table = table_search(0, rows=3, beams=4, depth=3, nodes=13)
    expected = {path for path, _ in slow_search(table, tree.tokens[row, 0].item(), 4, 3)}
    texts = texts_of(tree, row, 13)
    assert texts == expected
    assert len(texts) == 13


@pytest.mark.parametrize("seed", range(40))
def test_parents_come_first_and_siblings_differ(seed):
    tree, _ = table_search(seed, rows=2, beams=5, depth=4, nodes=9)
    for row in range(2):
        seen = set()
        for node in range(1, 9):
            parent = tree.parents[row, node].item()
            assert parent < node
            assert tree.depth[row, node] == tree.depth[row, parent] + 1
            seen.add((parent, tree.tokens[row, node].item()))
        assert len(seen) == 8


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_keeps_the_most_probable_nodes(seed):
    full, table = table_search(seed, rows=1, beams=5, depth=4, nodes=21)
    cut, _ = table_search(seed, rows=1, beams=5, depth=4, nodes=8)
    scored = slow_search(table, full.tokens[0, 0].item(), 5, 4)
    best = {path for path, _ in sorted(scored, key=lambda x: -x[1])[:8]}
    assert texts_of(cut, 0, 8) == best


def test_exact_ties_keep_the_parent():
    certain = torch.full((V, V), -1e9)
    certain[torch.arange(V), (torch.arange(V) + 1) % V] = 0.0  # every next token has probability one
    tree = beam_search(torch.tensor([3]), lambda k, tokens, sources: certain[tokens], beams=3, depth=4, nodes=4)
    assert tree.depth[0].tolist() == [0, 1, 2, 3]
    assert tree.tokens[0].tolist() == [3, 4, 5, 6]


def test_a_draft_vocabulary_is_mapped_to_the_targets_ids():
    ids = torch.tensor([100, 7, 42, 9, 55])
    scores = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])
    tree = beam_search(
        torch.tensor([5]),
        lambda k, tokens, sources: scores.expand(1, tokens.shape[1], 5),
        beams=2,
        depth=1,
        nodes=3,
        ids=ids,
    )
    assert tree.tokens[0].tolist() == [5, 7, 42]


def test_sources_say_which_beam_each_one_continues():
    seen = []

    def expand(k, tokens, sources):
        seen.append(sources)
        scores = torch.zeros(1, tokens.shape[1], V)
        if k == 1:
            scores[0, 2] += torch.arange(V) * 9  # the third beam's continuations win
        return scores

    beam_search(torch.tensor([0]), expand, beams=3, depth=3, nodes=10)
    assert seen[0].tolist() == [[0]]
    assert seen[1].tolist() == [[0, 0, 0]]
    assert 2 in seen[2][0].tolist()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("wrong", [1, 2], ids=["from the first step on", "from the second step on"])
def test_scores_that_are_no_numbers_leave_a_tree_under_its_root(beams, wrong):
    def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
        scores = torch.randn(2, tokens.shape[1], 20, generator=torch.Generator().manual_seed(k))
        return scores.index_fill(0, torch.tensor([1]), torch.nan) if k + 1 >= wrong else scores

    root = torch.tensor([5, 6])
    tree = beam_search(root, expand, beams=beams, depth=3, nodes=5)
    assert torch.equal(tree.tokens[:, 0], root)
    assert (tree.parents[:, 1:] < torch.arange(1, tree.tokens.shape[1])).all()
    assert torch.equal(tree.depth.gather(1, tree.parents)[:, 1:] + 1, tree.depth[:, 1:])
