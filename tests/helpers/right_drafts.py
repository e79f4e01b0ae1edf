"""Drafts that are right: random paths of the trees of untrained drafters get the tokens that the target will draw."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from redrafter.drafting.proposer import SearchProposer, State
from redrafter.tree.token_tree import Tree


class RightDrafts:
    """Overwrites a random path of each row's tree with the true continuation, so that deep branches are accepted.

    Attributes:
        texts: Whole sequences, prompts included, that rows may be at the beginning of.
        share: How many of the trees get a true path.
        off_chain: How many nodes of true paths were not the first child of their parent.
    """

    def __init__(self, texts: Sequence[Sequence[int]], seed: int = 0, share: float = 0.7):
        self.texts, self.share, self._random = texts, share, random.Random(seed)
        self.off_chain = 0

    def write_into(self, tree: Tree, state: State) -> Tree:
        """Return the tree with true paths; siblings keep different tokens."""
        tokens = tree.tokens.clone()
        for row in state.active.nonzero().flatten().tolist():
            known = state.tokens[row, : int(state.length[row]) + 1].tolist()
            text = next(
                (text for text in self.texts if len(text) > len(known) and [*text[: len(known)]] == known), None
            )
            if text is None or self._random.random() > self.share:
                continue
            parents = tree.parents[row].tolist()
            verified = len(parents) if tree.counts is None else int(tree.counts[row])
            node = 0
            for token in text[len(known) : len(known) + self._random.choice((1, 2, 3, 99, 99))]:
                children = [child for child in range(1, verified) if parents[child] == node]
                if not children:
                    break
                chosen = self._random.choice(children)
                self.off_chain += chosen != children[0]
                siblings = [child for child in range(1, len(parents)) if parents[child] == node and child != chosen]
                for same in siblings:
                    if tokens[row, same] == token:
                        tokens[row, same] = tokens[row, chosen]
                tokens[row, chosen], node = token, chosen
        return replace(tree, tokens=tokens)

    @contextmanager
    def drafted(self) -> Iterator[None]:
        """Let all drafters that search a tree draft true paths; what watches their own drafts must be there before."""
        with pytest.MonkeyPatch.context() as patch:
            for searching in _without_subclasses(SearchProposer):
                patch.setattr(searching, "propose", self._corrected(searching.propose))
            yield

    def _corrected(self, propose: Any) -> Any:
        def corrected(proposer: SearchProposer, state: State, *arguments: Any) -> Tree:
            return self.write_into(propose(proposer, state, *arguments), state)

        return corrected


def _without_subclasses(base: type) -> list[type]:
    """Return the subclasses of a class that have none themselves."""
    return [leaf for sub in base.__subclasses__() for leaf in _without_subclasses(sub)] or [base]
