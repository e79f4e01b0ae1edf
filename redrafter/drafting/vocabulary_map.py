"""A map from the target's tokens to a draft model's tokens, for draft models with another vocabulary.

The draft model proposes tokens that both vocabularies have: those with the same bytes (token-level intersection, Timor
et al. 2025). It reads any token of the target as one or several of its own tokens, its pieces. So its sequence has
another length than the target's, the sum of the pieces of its tokens: a function of the target's sequence, so no
further state is kept from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

UNSHARED_SCORE = -2e9  # below any score of a token that may be drafted, including forbidden ones


@dataclass(frozen=True)
class VocabularyMap:
    """Maps each of the target's V tokens to the draft model's.

    Attributes:
        pieces: The draft model's ids for each token, `[V, m]` int64; 0 after the last one.
        counts: Number of pieces, from 1 to m, `[V]` int64.
        draft_ids: The draft model's id with the same bytes, `[V]` int64; 0 if it has none.
        shared: Whether it has one, `[V]` bool. A shared token has one piece, that id.
        start: The draft model's ids at the start of each sequence, before the first token of the target.
    """

    pieces: Tensor
    counts: Tensor
    draft_ids: Tensor
    shared: Tensor
    start: tuple[int, ...] = ()

    @property
    def max_pieces(self) -> int:
        """m, the maximum number of pieces of a token."""
        return self.pieces.shape[1]

    @property
    def shared_count(self) -> int:
        """Number of tokens that both vocabularies have."""
        return int(self.shared.sum())

    def fit(self, vocab_size: int, draft_vocab_size: int) -> "VocabularyMap":
        """Return the map for models whose tables are larger or smaller than their tokenizers' vocabularies.

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
        """Return the number of draft-model tokens of the first `length` `[B]` tokens of rows `[B, T]`, `[B]`."""
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
        """Return scores `[..., V]` by which tokens that are not shared are chosen after all others.

        The length of the draft model's sequence follows from the tokens, so it must have read accepted drafts as one
        piece.

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
    """A sequence in the draft model's tokens, which grows with the target's.

    Attributes:
        ids: The draft model's ids.
    """

    def __init__(self, vocabulary: VocabularyMap):
        """Begin with no tokens of the target."""
        self._vocabulary = vocabulary
        self.ids = list(vocabulary.start)
        self._ends = [len(self.ids)]  # number of ids by number of the target's tokens

    def length(self, tokens: Sequence[int], count: int | None = None) -> int:
        """Return how many of `ids` are the first `count` tokens of a sequence of the target's tokens; None for all.

        The sequence begins with the tokens of earlier calls.
        """
        pieces = self._vocabulary.on_host
        for token in tokens[len(self._ends) - 1 :]:
            self.ids += pieces[token]
            self._ends.append(len(self.ids))
        return self._ends[len(tokens) if count is None else count]

    def bound(self, tokens: Sequence[int], positions: int) -> int:
        """Return the maximum number of draft-model slots that a sequence needs at this number of positions."""
        return self.length(tokens) + self._vocabulary.max_pieces * (positions - len(tokens))
