"""Compare what a step accepts and reports with a walk down each tree."""

import pytest
import torch

from helpers.outcomes import random_outcome
from redrafter.tree.accept import accept, acceptable_nodes
from redrafter.tree.report import accept_drafts


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_a_report_says_what_became_of_each_row(shared, limited):
    outcome = random_outcome(6, 13, shared=shared, limited=limited)
    tree, length, depth = outcome["tree"], outcome["length"], outcome["max_depth"]
    acceptable = acceptable_nodes(tree, outcome["limits"])
    expected = accept(tree, outcome["drawn"], depth, acceptable)
    assert len(set(expected.accepted.tolist())) > 2
    before = outcome["texts"].clone()
    path, report, after = accept_drafts(**outcome)
    assert path.nodes.equal(expected.nodes)
    assert report.packed.shape[1] == depth + 5
    assert after.equal(length + (path.accepted + 1) * outcome["active"])
    for row, n in enumerate(length.tolist()):
        kept = path.nodes[row, : path.accepted[row] + 1]
        tokens = outcome["drawn"][row, kept]
        assert report.tokens[row, : len(kept)].equal(tokens)
        assert outcome["texts"][row, n + 1 : n + 1 + len(kept)].equal(tokens)
        assert outcome["texts"][row, : n + 1].equal(before[row, : n + 1])
        assert report.accepted[row] == len(kept) - 1
        assert report.drafted[row] == (tree.new if acceptable is None else acceptable[row].sum()) - 1
        finite = outcome["finite"][row, path.nodes[row]].tolist()
        assert report.finite[row] == (finite.index(0) if 0 in finite else len(finite))
        assert report.copied[row] == (kept >= tree.new - tree.grafted).sum()


def test_a_lone_pending_token_is_reported_without_drafts():
    outcome = random_outcome(3, 1, shared=False, limited=True)
    _, report, after = accept_drafts(**outcome | {"active": torch.ones(3, dtype=torch.bool)})
    assert report.tokens.equal(outcome["drawn"])
    assert not torch.stack([report.accepted, report.drafted, report.copied]).any()
    assert report.finite.equal(outcome["finite"][:, 0])
    assert after.equal(outcome["length"] + 1)
