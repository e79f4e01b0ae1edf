"""Drafts copied from the text itself: the tokens that followed an earlier occurrence of its last tokens.

`WithPromptLookup` adds such a chain to the tree of any other proposer, as further nodes, or drafts nothing else. Since
a draft counts only if the target draws it, any union of drafts is as exact as each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.proposer import Proposer, State
from redrafter.model.target import Target
from redrafter.sampling.sampler import Sampler
from redrafter.tree.accept import accept
from redrafter.tree.sizes import check_size
from redrafter.tree.token_tree import Tree, chain

MATCH_TOKENS = 8  # maximum number of last tokens to match, where the user chooses none
LEAST_MATCH = 2  # minimum number of matching tokens, as single tokens recur by chance
DRAFTS_PER_MATCHED = 2  # on a CPU, where each node takes time: a long match is more likely to continue


def latest_match(tokens: Tensor, length: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find the longest earlier occurrence of each row's last tokens in its own sequence, on a tie the latest.

    Args:
        tokens: Each row's text by position, `[B, T]` int64; ignored after the pending token.
        length: Position of the pending token, the last one that is matched, `[B]` int64.
        most: Maximum number of last tokens to match.

    Returns:
        The position after the occurrence, 0 for none, and the number of matching tokens, `[B, 1]` int64 each.
    """
    last, back = length[:, None], torch.arange(1 - most, 1, device=tokens.device)
    # Paddings of -1 and -2 match neither a token nor each other.
    key = tokens.gather(1, (last + back).clamp(min=0)).masked_fill(last + back < 0, -1)  # [B, most]
    ending = pad(tokens, (most - 1, 0), value=-2).unfold(1, most, 1)  # [B, T, most], the tokens up to each position
    back_by = torch.arange(1, most + 1, device=tokens.device)
    matched = most - ((ending != key[:, None]) * back_by).amax(-1)  # [B, T], number of tokens after the last difference
    position = torch.arange(tokens.shape[1], device=tokens.device)
    # The longest match, and on a tie the latest, whose continuation is the likeliest to recur.
    rank = torch.where(position < last, matched * tokens.shape[1] + position, 0)
    best = rank.argmax(dim=1, keepdim=True)
    found = matched.gather(1, best).where(best < last, 0)
    return torch.where(found > 0, best + 1, 0), found


class Repeats:
    """Checks on the host whether a sequence has a match, so that a step without one can skip the search.

    It is only a hint: `latest_match` finds the copied tokens, and drafts change no token.
    """

    def __init__(self) -> None:
        """Begin before any token was read."""
        self._seen: set[tuple[int, ...]] = set()  # each run of LEAST_MATCH tokens that has a next token
        self._read = LEAST_MATCH  # where the next run ends

    def has_match(self, tokens: Sequence[int]) -> bool:
        """Return whether the last LEAST_MATCH tokens of a sequence, which continues earlier calls', occur before."""
        for end in range(self._read, len(tokens)):
            self._seen.add(tuple(tokens[end - LEAST_MATCH : end]))
        self._read = max(self._read, len(tokens))
        return tuple(tokens[-LEAST_MATCH:]) in self._seen


def copy_from(tokens: Tensor, length: Tensor, start: Tensor, count: int) -> Tensor:
    """Return the `count` tokens from position `start` `[B, 1]` on, `[B, count]`; 0 is the pending token.

    Past the end of the text it starts over, which is right if the text is in a loop.
    """
    last = length[:, None]
    steps = torch.arange(count, device=tokens.device) % (last + 1 - start)
    return tokens.gather(1, torch.where(start > 0, start + steps, last))


@dataclass(frozen=True)
class WithPromptLookup:
    """Adds a chain that is copied from the text to another proposer's drafts.

    Prompt and generated text are searched alike. The longest match wins, and of these the latest.

    Attributes:
        without_text: The other proposer. A draft model reads L more of the last tokens in each step, as it has not read
            copied ones.
        draft_len: L, number of added tokens.
        ngram: Maximum number of last tokens to match.
    """

    without_text: Proposer
    draft_len: int
    ngram: int = MATCH_TOKENS

    shared_nodes = None

    def __post_init__(self) -> None:
        check_size("draft_len", self.draft_len)
        check_size("ngram", self.ngram)

    @property
    def model(self) -> Target | None:
        """The LM that drafts, or None."""
        return self.without_text.model

    @property
    def beams(self) -> int:
        """W, beams of the other proposer's search."""
        return self.without_text.beams

    @property
    def nodes(self) -> int:
        """N, the other proposer's nodes and L more."""
        return self.without_text.nodes + self.draft_len

    @cached_property
    def depth(self) -> int:
        """K, levels of drafts: the chain may begin below the deepest node of the other's tree."""
        return self.without_text.depth + self.draft_len

    @property
    def sizes(self) -> dict[str, int]:
        """The other proposer's sizes and the copied chain's."""
        if self.without_text.sizes is None:
            return {"ngram": self.ngram, "draft_len": self.draft_len}
        return self.without_text.sizes | {"draft_from_text": self.draft_len}

    @cached_property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to."""
        return self.without_text.scratch_slots + self.draft_len

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Draft the other proposer's tree, and add a chain copied from the text.

        A GPU always verifies all L nodes, as a captured step has one shape, and a few more nodes cost hardly any time.
        """
        tree = self.without_text.propose(state, sampler, noise, cache, draft_cache)
        start, matched = latest_match(state.tokens, state.length, self.ngram)
        count = self.draft_len
        if not matched.is_cuda:
            longest = int(matched.where(state.active[:, None], 0).max())
            if longest < LEAST_MATCH:
                return tree
            if longest < self.ngram:  # on a CPU each node takes time, and longer matches tend to continue for longer
                count = min(count, DRAFTS_PER_MATCHED * longest)
        return graft(tree, copy_from(state.tokens, state.length, start, tree.levels + count))


def graft(tree: Tree, drafts: Tensor) -> Tree:
    """Attach a chain of drafts to the deepest node of a tree that agrees with it.

    The nodes that agree are those that `accept` would keep if the chain were the target's draws. The tree has no node
    for the token after them, so siblings still differ.

    Args:
        tree: A tree of N nodes, K levels deep; the next forward computes all of them.
        drafts: The tokens that follow the pending one, `[B, K + L]` int64.

    Returns:
        The tree with L more nodes at the end.
    """
    rows, nodes = tree.tokens.shape
    count = drafts.shape[1] - tree.levels
    if not tree.levels:
        return replace(chain(torch.cat([tree.tokens, drafts], dim=1)), grafted=count)
    agreed = accept(tree, drafts.gather(1, tree.depth), tree.levels)
    first, new = agreed.accepted[:, None], torch.arange(count, device=drafts.device)  # [B, 1], [L]
    end = agreed.end[:, None]  # [B, 1], the node that the chain hangs on
    above = tree.ancestors.gather(1, end[..., None].expand(-1, 1, nodes))  # [B, 1, N]
    among = (new[:, None] >= new).expand(rows, count, count)
    ancestors = torch.cat([above.expand(-1, count, -1), among], dim=2)  # [B, L, N + L]
    return replace(
        tree,
        tokens=torch.cat([tree.tokens, drafts.gather(1, first + new)], dim=1),
        slots=None if tree.slots is None else torch.cat([tree.slots, (nodes + new).expand(rows, -1)], dim=1),
        parents=torch.cat([tree.parents, end, (nodes + new[:-1]).expand(rows, -1)], dim=1),
        depth=torch.cat([tree.depth, first + 1 + new], dim=1),
        ancestors=torch.cat([pad(tree.ancestors, (0, count)), ancestors], dim=1),
        levels=tree.levels + count,
        width=tree.width + 1,
        branches=True,
        grafted=count,
    )
