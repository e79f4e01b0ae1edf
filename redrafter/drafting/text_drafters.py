"""The interface of drafters that are evaluated on given texts and trained on them."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from redrafter.drafting.drafter_model import DrafterModel
from redrafter.errors import UnsupportedError


class GivenTexts(NamedTuple):
    """Sequences that a drafter drafts over from many of their positions at once, as a search drafts from their ends.

    Attributes:
        tokens: Token ids, `[B, T]` int64.
        features: Hidden states of the tokens that the drafter reads, `[B, T, F]`.
        embedding: The target's embeddings of the tokens, `[B, T, D]`.
        segment: Number of the text that each token belongs to within its row, `[B, T]`; None for one text a row.
        anchors: Flat positions of the A tokens whose hidden states predicted the pending tokens, `[A]` int64. Only
            position 0 may occur several times.
        position: Flat position of the token that each of K steps reads, `[A, K]` int64.
        table: The target's embedding table, which is frozen; None for drafters that embed no other tokens.
    """

    tokens: Tensor
    features: Tensor
    embedding: Tensor
    segment: Tensor | None
    anchors: Tensor
    position: Tensor
    table: nn.Module | None = None


ReadAt: TypeAlias = Callable[[Tensor, Tensor], object]
"""Returns what a drafter reads of texts at positions, for the arguments that `TrainableDrafter.read_texts` names."""


class TrainableDrafter(DrafterModel):
    """A drafter that drafts from many positions of given texts at once, as `redrafter evaluate` and `train` need it.

    Attributes:
        lm_head: The product whose logits are compared with the target's; None for the target's own head.
    """

    lm_head: nn.Linear | None

    def read_texts(self, tokens: Tensor, hidden: Tensor, embedding: Tensor) -> ReadAt | None:
        """Read whole texts, in order to draft from many of their positions at once.

        Args:
            tokens: Token ids of texts, `[B, T]` int64.
            hidden: Hidden states of the tokens that the drafter reads, `[B, T, F]`.
            embedding: The target's embeddings of the tokens, `[B, T, D]`.

        Returns:
            What returns the `context` of `SearchProposer.search` for positions, given the row of each, `[A]` int64, and
            the committed tokens before it, `[A]` int64; None where the drafter reads nothing of the text.
        """
        raise NotImplementedError

    def context_bytes(self, length: int, beams: int) -> int:
        """Return the bytes per position of a sequence of `length` tokens in a search with the result of `read_texts`.

        The search has `beams` beams; its scores over the vocabulary are not counted.
        """
        raise NotImplementedError

    def check_unroll(self, steps: int) -> None:
        """Raise `ArgumentError` or `UnsupportedError` if it cannot be trained for `steps` draft steps."""

    def unroll(self, texts: GivenTexts) -> Tensor:
        """Draft over given texts as the search does, and return the input of `trained_heads`, `[A, K, R]`."""
        raise NotImplementedError

    def trained_heads(self, x: Tensor) -> list[tuple[Tensor | None, ...]]:
        """Return the heads that learn from what `unroll` returns, of which the first one drafts.

        A head is an input `[A, K, r]` and a weight `[V', r]`, or several such pairs in a row, whose products are added.
        A weight of None is that of the target's head, which is frozen.
        """
        return [(x, None if self.lm_head is None else self.lm_head.weight)]

    def head_weights(self) -> list[Tensor]:
        """Return the drafter's own weights of `trained_heads`, each with a row for each id."""
        width = self.config.hidden_size if self.lm_head is None else self.lm_head.in_features
        nothing = next(self.parameters()).new_empty(0, 1, width)
        return [weight for head in self.trained_heads(nothing) for weight in head[1::2] if weight is not None]

    def unroll_bytes(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return about how many bytes `unroll` keeps for the gradients of all positions of rows of `length` tokens.

        They are named by their purpose, as `redrafter train --dry-run` shows them.
        """
        raise NotImplementedError


def require(drafter: DrafterModel, command: str) -> TrainableDrafter:
    """Return a drafter that drafts over given texts, as a command needs it; raise `UnsupportedError` for any other."""
    if isinstance(drafter, TrainableDrafter):
        return drafter
    raise UnsupportedError(
        f"`redrafter {command}` cannot draft over given texts with this drafter, of the kind "
        f"{drafter.config.kind}; `redrafter bench` measures its tokens per step"
    )
