"""The padded forward: all rows side by side in one batch, on a dense cache, with a 4-D mask over the model's attention.

It serves any model that can be served at all, on any device or spread over several.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from redrafter.attention.mask import TreeSlots, additive_mask
from redrafter.attention.prompt_plan import Piece
from redrafter.cache.dense import DenseCache
from redrafter.target.patch import ModelPatch
from redrafter.target.positions import answer_by_position, has_alibi
from redrafter.target.tree_forward import ModelParts, TreeForward
from redrafter.tree.token_tree import Tree

__all__ = ["PaddedForward"]


class PaddedForward(TreeForward):
    """A causal LM's forward over trees side by side, `[B, M]` new nodes, on a dense cache."""

    def __init__(self, parts: ModelParts, device: torch.device, dtype: torch.dtype):
        """Make the forward of a model.

        Args:
            parts: The model's parts.
            device: Of its embedding, and of all that is returned.
            dtype: Of its hidden states, and of the masks.
        """
        super().__init__(parts)
        self._device, self._dtype = device, dtype
        self._alibi = any(has_alibi(module) for module in parts.slot_readers)

    def __call__(
        self,
        tree: Tree,
        length: Tensor,
        cache: DenseCache,
        logits_index: Tensor | None = None,
        prompt: Tensor | None = None,
        position_shift: Tensor | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the new nodes of a tree through the model; see `TreeForward`."""
        nodes, new = tree.tokens.shape[1], tree.new
        cache.write_after(length + (nodes - new), new)
        places = length[:, None] + tree.depth[:, -new:]  # [B, M]
        positions = places if position_shift is None else places + position_shift[:, None]
        slots = TreeSlots(length, tree.depth, tree.ancestors, cache.window)
        keep = self._kept_columns(None if cache.adapters is None else cache.adapters[:, None].expand(-1, new))
        with (
            self.lock,
            self._recording() as patch,
            self._mixing(tree, length, cache, pieces),
        ):
            self._adapt(patch, keep)
            answer_by_position(patch, self._slot_readers, lambda: places, slots)
            self._choose_rope(patch, torch.zeros_like(length) if prompt is None else prompt)
            self._start_recording(logits_index)
            out = self._call_model(
                tree.tokens[:, -new:],
                # Nodes past the end of the context are never kept; they only must not index past a table.
                positions if self._context is None else positions.clamp(max=self._context - 1),
                cache,
                attention_mask=None if cache.committed else self._mask(slots),
            )
            hidden = self._recorded_hidden().to(self._device)  # [B, M, F]
        if self._drafter_layer is not None:
            flat = tree.tokens[:, -new:].flatten(), places.flatten(), hidden.flatten(0, 1)
            self._drafter_layer.write(cache, cache.slots(self._device), *flat)
        if logits_index is not None:
            hidden = _take(hidden, logits_index)
        return out.logits.to(self._device), hidden

    def read_whole(
        self,
        ids: Tensor,
        inputs: Mapping[str, Any],
        past: DynamicCache,
        adapters: Tensor | None = None,
        prompt: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Read one text as the model itself does, all of it at once.

        Args:
            ids: The text, `[1, P]` int64.
            inputs: What else the model takes of it, by name.
            past: A cache of transformers' own with what stands before it; receives the keys and values of the layers.
            adapters: Slot of the text's adapter, `[1]` int64; None for the model alone.
            prompt: Length of text whose rope all tokens have at least.

        Returns:
            Logits `[1, V]` of the last token, and hidden states of all, `[1, P, F]`.
        """
        keep = self._kept_columns(None if adapters is None else adapters[:, None].expand_as(ids))
        least = torch.tensor([prompt], device=ids.device)
        with self.lock, self._recording() as patch:
            self._adapt(patch, keep)
            self._choose_rope(patch, least)
            self._start_recording(torch.tensor([ids.shape[1] - 1], device=ids.device))
            out = self._model(input_ids=ids, past_key_values=past, use_cache=True, **inputs)
            hidden = self._recorded_hidden().to(self._device)
        return out.logits[:, -1].to(self._device), hidden

    def _select(self, hidden: Tensor) -> Tensor:
        return hidden if self._index is None else _take(hidden, self._index.to(hidden.device))

    def _choose_rope(self, patch: ModelPatch, prompt: Tensor) -> None:
        """Rotate tokens by the lengths of their texts. prompt: the least of each row, `[B]` int64."""
        if self._rope is not None:
            self._rope.apply(patch, lambda: prompt[:, None])

    def _mask(self, slots: TreeSlots) -> Tensor | dict[str, Tensor | None] | None:
        """Return the additive mask `[B, 1, M, S]`, one by name where kinds differ; with ALiBi, ones `[B, S]`.

        It is None for a model without attention.
        """
        if self._alibi:
            return torch.ones_like(slots.positions)
        masks: dict[str, Tensor | None] = {
            name: additive_mask(slots.seen(kind), self._dtype) for name, kind in self._kinds.by_name.items()
        }
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        return {"linear_attention": None, "conv": None} | masks  # mixers are given no padding to mask


def _take(hidden: Tensor, index: Tensor) -> Tensor:
    """Return the hidden states `[B, 1, D]` of one node of each row, `index` `[B]`."""
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[-1]))
