"""Prompt lookup: drafts copied from an earlier occurrence of the last tokens in the same text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.cache.kv_cache import KVCache
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.tree.token_tree import Tree, chain, check_size


@dataclass(frozen=True)
class PromptLookupProposer:
    """Drafts the tokens that followed the latest earlier occurrence of a row's last tokens, as a chain.

    Prompt and generated text are searched alike. The longest match wins, up to `ngram` tokens.

    Attributes:
        ngram: The most last tokens to match.
        draft_len: K, tokens to draft.
    """

    ngram: int
    draft_len: int

    model = shared_nodes = None

    def __post_init__(self) -> None:
        for name in ("ngram", "draft_len"):
            check_size(name, getattr(self, name))

    @property
    def nodes(self) -> int:
        """N, the drafts and the pending token."""
        return 1 + self.draft_len

    @property
    def depth(self) -> int:
        """K, the drafts."""
        return self.draft_len

    @property
    def sizes(self) -> dict[str, int]:
        """Tokens that are looked for, and tokens that are drafted."""
        return {"ngram": self.ngram, "draft_len": self.draft_len}

    @property
    def scratch_slots(self) -> int:
        """Slots after a row's committed tokens that a step writes to."""
        return self.nodes

    def propose(
        self, state: State, sampler: Sampler, noise: Tensor | None, cache: KVCache, draft_cache: KVCache | None
    ) -> Tree:
        """Copy drafts from each row's own text; see `Proposer.propose`."""
        last = state.length[:, None]  # [B, 1], position of the pending token
        start = torch.zeros_like(last)  # [B, 1], position of the drafts; 0 without a match
        for size in range(1, min(self.ngram, state.tokens.shape[1]) + 1):  # a longer match overrules a shorter one
            after = _after_latest(state.tokens, last, size)
            start = torch.where(after > 0, after, start)
        # A continuation that reaches the end of the text starts over, which is right where the text is in a loop.
        steps = torch.arange(self.draft_len, device=last.device) % (last + 1 - start)
        drafts = state.tokens.gather(1, torch.where(start > 0, start + steps, last))  # [B, K]
        return chain(torch.cat([state.pending, drafts], dim=1))


def _after_latest(tokens: Tensor, last: Tensor, size: int) -> Tensor:
    """Return the position after the latest earlier occurrence of a row's last tokens, `[B, 1]` int64; 0 for none.

    Args:
        tokens: Each row's text by position, `[B, T]` int64; ignored after `last`.
        last: Position of the last token, `[B, 1]` int64.
        size: How many last tokens must match.
    """
    key = tokens.gather(1, (last + torch.arange(1 - size, 1, device=last.device)).clamp(min=0))  # [B, size]
    same = (tokens.unfold(1, size, 1) == key[:, None]).all(dim=-1)  # [B, T - size + 1], by position of the first token
    after = torch.arange(size, size + same.shape[1], device=last.device)
    return torch.where(same & (after <= last) & (last + 1 > size), after, 0).amax(dim=1, keepdim=True)
