"""A second, smaller LM as a proposer of trees."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import State
from redrafter.sampling.noise import DRAFT
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.tree.beam_search import beam_search
from redrafter.tree.token_tree import Tree, chain, tree_of

__all__ = ["DraftModelProposer"]

MIN_SCORE = -1e9  # in place of -inf: a sum of such scores is still a number, and of two the higher one still wins


@dataclass(frozen=True)
class DraftModelProposer:
    """The draft model's top continuations: `beams` = W wide, `depth` = K deep, cut to the `nodes` = N best nodes.

    It draws as the target will, from scores that went through the same processing and under the same noise, so a draft
    model that knows what the target knows guesses every token. Its cache follows the accepted path as the target's
    does; one token is read again each step, the last committed one, which is the only one it may not have seen.

    model: the draft model. vocab_size: ids of the target, V; what the draft model has beyond is padding, and what it
    lacks it never proposes. sampled: draw drafts under noise of their own and keep what they were drawn from, for
    rejection sampling; W is 1 then. confidence: end a step's drafting once its likeliest beam is, on average over the
    rows that move, less likely to be right throughout than this says for so many rows; None to draft K deep always, as
    a captured step must.
    """

    model: Target
    vocab_size: int
    beams: int
    depth: int
    nodes: int
    sampled: bool = False
    confidence: Callable[[int], float] | None = None

    @property
    def scratch_slots(self) -> int:
        """Of the draft model, which holds what is cut, too."""
        return 1 + self.beams * self.depth

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None) -> Tree:
        assert cache is not None, "a draft model has a cache"
        home, away = state.length.device, self.model.device
        if home != away:  # ids alone cross
            ids = {name: getattr(state, name).to(away) for name in ("tokens", "length", "active")}
            state, sampler = replace(state, **ids), sampler.to(away)
        if self.sampled and noise is not None:
            noise = sampler.stream(DRAFT).noise(state.length + 1, self.depth)  # [B, K, V]
        elif home != away:
            noise = sampler.noise(state.length + 1, self.depth)
        tree, sampled_from = self._search(state, sampler, noise, cache)
        if self.sampled and noise is not None and sampled_from:
            tree = replace(tree, sampled_from=torch.cat(sampled_from, dim=1))
        return tree if home == away else tree.to(home)

    def _search(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache
    ) -> tuple[Tree, list[Tensor]]:
        """The tree, and per level the scores `[B, W, V]` that its tokens were picked from, before noise."""
        grown = _Lattice(state.pending)
        seen: list[Tensor] = []

        def expand(k: int, tokens: Tensor, sources: Tensor) -> Tensor:
            if k:
                grown.add(tokens, sources)
            tree, window = grown.tree, min(cache.window, state.tokens.shape[1])
            logits = self._ask(tree, state.length, cache) if k else self._ask_first(state, cache)  # [B, w, V]
            prefixes = Prefixes(state.tokens, state.length, sampler.prompt, sampler.limit, tree, window)
            scores = sampler.process(logits, prefixes)
            seen.append(scores)
            if noise is not None:
                scores = scores + noise[:, k, None]
            return scores if scores is logits else scores.clamp(min=MIN_SCORE)  # a grammar may leave nothing at all

        def should_stop(total: Tensor) -> bool:
            rows = zip(total[:, 0].tolist(), state.active.tolist(), strict=True)  # the best beam is the first
            likely = [math.exp(best) for best, moves in rows if moves]
            return self.confidence is not None and sum(likely) < self.confidence(len(likely)) * len(likely)

        tree = beam_search(
            state.pending[:, 0],
            expand,
            beams=self.beams,
            depth=self.depth,
            nodes=self.nodes,
            should_stop=should_stop if self.confidence else None,
        )
        return tree, seen

    def _ask_first(self, state: State, cache: KVCache) -> Tensor:
        """What may follow the pending token, `[B, 1, V]`. The last committed token goes before it: when all drafts of a
        step are kept, the last of them is one that the draft model has proposed and not read."""
        behind = (state.length - 1).clamp(min=0)  # rows that hold nothing stand still in block 0
        pair = state.tokens.gather(1, behind[:, None] + torch.arange(2, device=behind.device))  # [B, 2]
        return self._ask(chain(pair), behind, cache, only=torch.ones_like(behind))

    def _ask(self, tree: Tree, length: Tensor, cache: KVCache, only: Tensor | None = None) -> Tensor:
        """Logits at the tree's new nodes over the target's ids, `[B, M, V]`."""
        tree = replace(tree, tokens=self.model.clamp_to_vocab(tree.tokens))
        logits, _ = self.model.verify(tree, length, cache, only)
        if logits.shape[-1] < self.vocab_size:
            return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=torch.finfo(logits.dtype).min)
        return logits[..., : self.vocab_size]


class _Lattice:
    """A tree as beam search grows it: each level's nodes are the new ones."""

    def __init__(self, root: Tensor):
        self.tree = chain(root)
        self._levels, self._above = 0, 0  # how many there are below the root; where the last one begins

    def add(self, tokens: Tensor, sources: Tensor) -> None:
        """tokens, sources: `[B, W]`, and which nodes of the level above they continue."""
        tree, wide = self.tree, tokens.shape[1]
        whole = torch.cat([tree.tokens, tokens], dim=1)
        if wide == 1:
            self.tree = chain(whole).last(1)
            return
        self._levels += 1
        parents = torch.cat([tree.parents, sources + self._above], dim=1)
        depth = torch.cat([tree.depth, torch.full_like(tokens, self._levels)], dim=1)
        self._above = tree.tokens.shape[1]
        self.tree = tree_of(whole, parents, depth, max_depth=self._levels).last(wide)
