"""Drafts from the text itself: what stood after the same words before, stands after them again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.cache.paged import KVCache
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree, chain, check_size

__all__ = ["PromptLookupProposer"]


@dataclass(frozen=True)
class PromptLookupProposer:
    """Proposes what followed the latest earlier occurrence of a row's last `ngram` tokens, or of fewer where so many
    never stood together before: a chain of `draft_len` tokens, from the prompt and from what was written."""

    ngram: int
    draft_len: int

    model = None

    @property
    def scratch_slots(self) -> int:
        return self.nodes

    def __post_init__(self) -> None:
        for name in ("ngram", "draft_len"):
            check_size(name, getattr(self, name))

    @property
    def nodes(self) -> int:
        return 1 + self.draft_len

    @property
    def depth(self) -> int:
        return self.draft_len

    def propose(self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache | None = None) -> Tree:
        last = state.length[:, None]  # [B, 1], where the pending token stands
        start = torch.zeros_like(last)  # where the drafts stand, 0 for nowhere
        for size in range(1, min(self.ngram, state.tokens.shape[1]) + 1):  # a longer match is a better one
            found = _after_latest(state.tokens, last, size)
            start = torch.where(found > 0, found, start)
        # A continuation that reaches the end of the text begins again: it is what a loop writes.
        steps = torch.arange(self.draft_len, device=last.device) % (last + 1 - start)
        drafts = state.tokens.gather(1, torch.where(start > 0, start + steps, last))  # [B, K]
        return chain(torch.cat([state.pending, drafts], dim=1))


def _after_latest(tokens: Tensor, last: Tensor, size: int) -> Tensor:
    """The position after the latest earlier occurrence of the `size` tokens that end at `last`: `[B, 1]`, 0 for none.

    tokens: `[B, T]`, of which those after `last` `[B, 1]` say nothing.
    """
    key = tokens.gather(1, (last + torch.arange(1 - size, 1, device=last.device)).clamp(min=0))  # [B, size]
    same = (tokens.unfold(1, size, 1) == key[:, None]).all(dim=-1)  # [B, T - size + 1], by where a window begins
    after = torch.arange(size, size + same.shape[1], device=last.device)
    return torch.where(same & (after <= last) & (last + 1 > size), after, 0).amax(dim=1, keepdim=True)
