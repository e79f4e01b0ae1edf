"""What the searches of a drafter compute, compared with a plain recomputation of the whole text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from redrafter.drafting.proposer import State
from redrafter.tree.token_tree import Tree

EVERY = 3  # A third of the lengths that a text comes to is checked: a recomputation takes as long as several steps.


def keep_result(kept: list[Any], result: Any, *arguments: object) -> None:
    kept.append(result)


@contextmanager
def checked_searches(
    proposer: Any,
    watched: type,
    method: str,
    check: Callable[[Any, int, Tensor, list[int], Tensor, list[Any]], None],
    keep: Callable[..., None] = keep_result,
) -> Iterator[None]:
    """Check what is drafted after each text, after long ones too.

    Args:
        proposer: The class that drafts.
        watched: A class that drafts are made with, and its method, each of whose calls is kept.
        method: Its name.
        check: Called with a proposer, a row, its text `[n + 1]`, the beams on a path from the root, the drafts on that
            path `[K]`, and what was kept.
        keep: Called with what was kept so far, a result, and the arguments.
    """
    propose, call, checked, kept = proposer.propose, getattr(watched, method), [], list[Any]()

    def call_kept(self: Any, *arguments: object) -> Any:
        result = call(self, *arguments)
        keep(kept, result, *arguments)
        return result

    def propose_checked(self: Any, state: State, *arguments: object) -> Tree:
        kept.clear()
        tree = propose(self, state, *arguments)
        for row in state.active.nonzero().flatten().tolist():
            text = state.tokens[row, : state.length[row] + 1]
            if len(text) % EVERY == 0:
                path = best_path(tree, row)
                beams = [node - 1 - (level - 1) * self.beams if level else 0 for level, node in enumerate(path)]
                check(self, row, text, beams[: len(kept)], tree.tokens[row, path[1:]], kept)
                checked.append(len(text))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "propose", propose_checked)
        patch.setattr(watched, method, call_kept)
        yield
    assert max(checked, default=0) > 24, "no long text was checked"


def best_path(tree: Tree, row: int) -> list[int]:
    """Return the nodes of a whole lattice from the root to the first node of its last level."""
    node = int((tree.depth[row] == tree.levels).nonzero()[0])
    path = [node]
    while node:
        node = int(tree.parents[row, node])
        path.append(node)
    return path[::-1]
