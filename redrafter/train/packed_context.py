"""Attention to committed tokens in training: from all anchors of packed texts at once."""

import torch
from torch import Tensor

from redrafter.drafting.context_attention import packed_mask, with_empty_entry
from redrafter.drafting.drafter import RecurrentDrafter

__all__ = ["PackedContext"]


class PackedContext:
    """The keys and values of a batch's texts, and which of them each anchor attends to.

    All positions of the texts attend at once, as queries of one product. So the anchors' states are put at their
    positions, and zeros at the others.

    Args:
        drafter: A drafter that attends to committed tokens.
        hidden: Hidden states of all tokens as `RecurrentDrafter.fuse_hidden` returns them, `[B, T, D]`.
        embedding: The base's embeddings of the tokens, `[B, T, D]`.
        segment: Number of the text that each token belongs to within its row, `[B, T]`; None for one text a row.
        anchors: Flat positions of the anchors, `[A]` int64. Only position 0 may occur several times: no pair ends
            there, so it reads nothing, and its state gets no gradient from here.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        hidden: Tensor,
        embedding: Tensor,
        segment: Tensor | None,
        anchors: Tensor,
    ):
        attention, window = drafter.context, drafter.config.context_window
        assert attention is not None, "the drafter has a context_window"
        assert window is not None, "the drafter has a context_window"
        rows, length, _ = hidden.shape
        self._attention, self._shape, self._anchors = attention, (rows, length), anchors
        keys, values = attention.remember(hidden, embedding, torch.arange(length, device=hidden.device))
        self._keys, self._values = with_empty_entry(keys[:, :-1]), with_empty_entry(values[:, 1:])
        self._mask = packed_mask(segment, rows, length, window, hidden.device)

    def read(self, step: int, state: Tensor) -> Tensor:
        """Attend from the anchors' states after a draft step to the texts, and return what they read, `[A, D]`.

        Args:
            step: Number of the draft step, from 0.
            state: The state of each anchor, `[A, D]`.
        """
        rows, length = self._shape
        grid = state.new_zeros(rows * length, state.shape[-1]).index_copy(0, self._anchors, state)
        attended = self._attention.read_packed(
            grid.unflatten(0, (rows, length)), step, self._keys, self._values, self._mask
        )
        return attended.flatten(0, 1).index_select(0, self._anchors)
