"""A map from the target's tokens to those of a draft model with another vocabulary.

The draft model proposes tokens that both vocabularies have: those that stand for the same bytes (token-level
intersection, Timor et al. 2025). It reads any token of the target, as one token of its own or as several, its pieces.
Its text then has another length than the target's, which is the sum of the pieces of the tokens: a function of the
target's text alone, so nothing but that text is kept from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

UNSHARED_SCORE = -2e9  # below any score of a token that may be drafted, forbidden ones included


@dataclass(frozen=True)
class VocabularyMap:
    """Maps each of the target's V tokens to the draft model's.

    Attributes:
        pieces: The draft model's ids that it reads, `[V, m]` int64; 0 after the last one.
        counts: How many these are, from 1 to m, `[V]` int64.
        draft_ids: The draft model's id of the same bytes, `[V]` int64; 0 where it has none.
        shared: Whether it has one, `[V]` bool. A shared token has one piece, that id.
        start: The draft model's ids that each of its texts begins with, before the first token of the target.
    """

    pieces: Tensor
    counts: Tensor
    draft_ids: Tensor
    shared: Tensor
    start: tuple[int, ...] = ()

    @property
    def max_pieces(self) -> int:
        """m, the most tokens of the draft model for one of the target."""
        return self.pieces.shape[1]

    @property
    def shared_count(self) -> int:
        """How many tokens both vocabularies have."""
        return int(self.shared.sum())

    def fit(self, vocab_size: int, draft_vocab_size: int) -> "VocabularyMap":
        """Return the map for models whose tables are larger or smaller than what their tokenizers count.

        Args:
            vocab_size: V, ids of the target.
            draft_vocab_size: Ids of the draft model; it reads those past its table as 0, and drafts none of them.
        """
        more = vocab_size - len(self.counts)
        fits = self.draft_ids < draft_vocab_size
        pieces = self.pieces.where(self.pieces < draft_vocab_size, 0)
        return replace(
            self,
            pieces=pad(pieces, (0, 0, 0, more)),
            counts=pad(self.counts, (0, more), value=1),
            draft_ids=pad(self.draft_ids.where(fits, 0), (0, more)),
            shared=pad(self.shared & fits, (0, more)),
        )

    def to(self, device: torch.device) -> "VocabularyMap":
        """Return the map on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("pieces", "counts", "draft_ids", "shared")}
        return replace(self, **moved)

    def draft_length(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Return how many tokens of the draft model the first `length` `[B]` tokens of rows `[B, T]` are, `[B]`."""
        known = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        return (self.counts[tokens] * known).sum(dim=1) + len(self.start)

    def last_piece(self, tokens: Tensor) -> Tensor:
        """Return the last piece of each token, in the shape of `tokens`."""
        return self.pieces[tokens, self.counts[tokens] - 1]

    def restrict(self, logits: Tensor) -> Tensor:
        """Return the draft model's logits `[..., V']` over the target's ids, `[..., V]` float32, lowest if unshared."""
        # Finite, as sums of scores are compared: two infinite ones could not be ordered.
        lowest = torch.finfo(torch.float32).min
        return logits.float().index_select(-1, self.draft_ids).masked_fill_(~self.shared, lowest)

    def never_draft_others(self, scores: Tensor, lowest: float) -> Tensor:
        """Return scores `[..., V]` by which a token that is not shared is chosen after any that is.

        A text's draft tokens are counted by its tokens, so the draft model must have read accepted drafts as they are.

        Args:
            scores: Scores after the processors, which may forbid every shared token.
            lowest: The least score of a shared token.
        """
        return scores.clamp(min=lowest).masked_fill_(~self.shared, UNSHARED_SCORE)

    @cached_property
    def on_host(self) -> list[list[int]]:
        """The pieces of each token."""
        return [ids[:count] for ids, count in zip(self.pieces.tolist(), self.counts.tolist(), strict=True)]


class DraftText:
    """One text as the draft model reads it, which grows as the text does.

    Attributes:
        ids: The draft model's ids.
    """

    def __init__(self, vocabulary: VocabularyMap):
        """Begin without tokens of the target."""
        self._vocabulary = vocabulary
        self.ids = list(vocabulary.start)
        self._ends = [len(self.ids)]  # of each number of tokens of the target

    def length(self, tokens: Sequence[int], count: int | None = None) -> int:
        """Return how many of `ids` spell the first `count` tokens of a text in the target's tokens; None for all.

        The text begins with those that were given before.
        """
        pieces = self._vocabulary.on_host
        for token in tokens[len(self._ends) - 1 :]:
            self.ids += pieces[token]
            self._ends.append(len(self.ids))
        return self._ends[len(tokens) if count is None else count]

    def bound(self, tokens: Sequence[int], positions: int) -> int:
        """Return the most slots of the draft model's cache that a text of the target needs at so many positions."""
        return self.length(tokens) + self._vocabulary.max_pieces * (positions - len(tokens))
