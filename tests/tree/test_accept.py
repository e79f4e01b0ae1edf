"""Acceptance, against a walk down the tree and against exact enumeration."""

import itertools

import torch

from redrafter.sampling.noise import gumbel
from redrafter.tree.accept import accept, acceptable_nodes
from redrafter.tree.token_tree import chain, tree_of


def small_tree(tokens):
    """Make a tree of a root, two children, and two children under the first: 0 -> (1, 2), 1 -> (3, 4)."""
    parents, depth = torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 2, 2]])
    rows = len(tokens)
    return tree_of(torch.tensor(tokens), parents.expand(rows, -1), depth.expand(rows, -1), 2)


def slow_accept(tree, drawn, row):
    """Walk down the tree from the root, as long as a child has the token that was drawn."""
    path = [0]
    while True:
        here = path[-1]
        next_nodes = [
            i
            for i in range(1, tree.tokens.shape[1])
            if tree.parents[row, i] == here and tree.tokens[row, i] == drawn[row, here]
        ]
        if not next_nodes:
            return path
        path.append(next_nodes[0])


def test_every_outcome_of_a_small_tree_agrees_with_walking_it():
    tree = small_tree([[0, 1, 2, 1, 2]])
    for draws in itertools.product(range(3), repeat=5):
        drawn = torch.tensor([draws])
        path, expected = accept(tree, drawn, 2), slow_accept(tree, drawn, 0)
        assert path.nodes[0, : path.accepted[0] + 1].tolist() == expected
        assert path.end.tolist() == [expected[-1]]
        assert path.accepted.tolist() == [len(expected) - 1]


def test_no_node_below_a_rows_limit_is_kept():
    tree = small_tree([[0, 1, 2, 1, 2]])
    for draws in itertools.product(range(3), repeat=5):
        drawn = torch.tensor([draws])
        whole = slow_accept(tree, drawn, 0)
        for limit in range(3):
            path = accept(tree, drawn, 2, acceptable_nodes(tree, torch.tensor([limit])))
            kept = whole[: limit + 1]
            assert path.nodes.tolist() == [kept + [0] * (3 - len(kept))]
            assert path.accepted.tolist() == [len(kept) - 1]


def test_a_confirmed_node_below_an_unconfirmed_one_is_not_kept():
    tree = small_tree([[0, 1, 2, 1, 2]])
    path = accept(tree, torch.tensor([[0, 2, 0, 0, 0]]), 2)  # node 4 matches at node 1, but node 1 was not drawn
    assert path.accepted.tolist() == [0]
    assert path.nodes.tolist() == [[0, 0, 0]]


def test_of_siblings_with_one_token_one_path_is_kept():
    """No drafter that is sound proposes them."""
    tree = small_tree([[0, 1, 1, 2, 2]])  # nodes 1 and 2 are alike, and so are 3 and 4 below node 1
    for draws in itertools.product(range(3), repeat=5):
        path = accept(tree, torch.tensor([draws]), 2)
        kept = path.nodes[0, : path.accepted[0] + 1].tolist()
        assert tree.depth[0, kept].tolist() == [*range(len(kept))]
        assert all(tree.parents[0, node] == above for above, node in itertools.pairwise(kept))
        assert all(tree.tokens[0, node] == draws[above] for above, node in itertools.pairwise(kept))


def test_rows_are_independent():
    tree = small_tree([[0, 1, 2, 1, 2], [0, 5, 6, 7, 8]])
    drawn = torch.tensor([[2, 0, 0, 0, 0], [5, 8, 0, 0, 9]])
    assert accept(tree, drawn, 2).nodes.tolist() == [[0, 2, 0], [0, 1, 4]]


def test_a_lone_pending_token_is_always_kept():
    path = accept(chain(torch.tensor([[4], [5]])), torch.tensor([[1], [2]]), 0)
    assert path.nodes.tolist() == [[0], [0]]
    assert path.accepted.tolist() == [0, 0]


def test_two_steps_over_any_tree_sample_exactly_from_the_target():
    """Compare 200,000 draws of a 3-letter Markov target with exact enumeration of its two-token texts.

    The tree proposes likely letters, as a drafter would, so a rule that accepts by anything but the target's own draw
    shifts the counts far outside the noise.
    """
    draws = 200_000
    logits = torch.tensor([[1.0, 0.2, -0.5], [-0.3, 0.9, 0.4], [0.1, -1.0, 0.6]])  # next letter given the last
    tree = tree_of(
        torch.tensor([[0, 0, 1, 1, 2]]).expand(draws, -1),
        torch.tensor([[0, 0, 0, 1, 2]]).expand(draws, -1),
        torch.tensor([[0, 1, 1, 2, 2]]).expand(draws, -1),
        2,
    )
    noise = gumbel(torch.arange(draws), torch.arange(3).expand(draws, 3), torch.arange(3))  # [draws, 3, 3]
    scores = logits[tree.tokens]  # [draws, N, 3]
    drawn = (scores + noise[:, tree.depth[0]]).argmax(-1)
    path = accept(tree, drawn, 2)
    tokens = drawn.gather(1, path.nodes)  # [draws, 3], real up to `accepted`
    first, second = tokens[:, 0], tokens[:, 1]
    alone = path.accepted == 0  # the second letter is then drawn by the next step, by the same rule and noise
    second = torch.where(alone, (logits[first] + noise[:, 1]).argmax(-1), second)
    frequencies = (first * 3 + second).bincount(minlength=9) / draws
    p = logits.softmax(-1)
    expected = (p[0][:, None] * p).flatten()
    sigma = (expected * (1 - expected) / draws).sqrt()
    assert ((frequencies - expected).abs() < 4 * sigma).all()
