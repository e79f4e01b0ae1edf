"""What forwards over token trees have in common, their hooks, and the padded one, which serves every model.

The padded forward has all rows side by side in one batch, on a dense cache, with a 4-D mask over the model's attention.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from redrafter.attention.mask import TreeSlots, additive_mask
from redrafter.attention.tree_plan import ChunkEnds
from redrafter.errors import UnsupportedError
from redrafter.model.drafter_inputs import DrafterLayer, join_hidden
from redrafter.model.forward_batch import ForwardBatch
from redrafter.model.lora import LoraStacks
from redrafter.model.model_state import CompiledPart, run_uncompiled
from redrafter.model.patch import ModelPatch
from redrafter.model.positions import answer_by_position, has_alibi
from redrafter.model.recurrent_layers import mixer_plan, replaced_mixers
from redrafter.model.rope import RopeByLength
from redrafter.model.traits import ModelTraits, cache_argument

# One lock a model, for all forwards of all targets on it: what one sets on the model, another must not take down.
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@dataclass(frozen=True)
class ModelParts:
    """The parts of a causal LM that its forwards work with.

    Attributes:
        model: The causal LM.
        head: Its language-modelling head.
        context: Positions that it can tell apart; None when it names no limit.
        traits: What its layers are.
    """

    model: Any
    head: nn.Module
    context: int | None
    traits: ModelTraits


class TreeForward(ABC):
    """A causal LM's forward over the new nodes of token trees. It leaves nothing on the model between calls.

    Attributes:
        lock: Held while anything is set on the model, by any forward of any target on it.
        compiled_parts: Parts that the model's owner has compiled, which run as they are written in our calls: they
            know neither the hooks nor the shapes of these.
    """

    def __init__(self, parts: ModelParts):
        """Make the forward of a model."""
        self._model, self._head, self._context = parts.model, parts.head, parts.context
        traits = parts.traits
        self._kinds, self._slot_readers, self._mixers = traits.kinds, traits.slot_readers, traits.mixers
        self._cache_argument = cache_argument(parts.model) or "past_key_values"
        self._rope: RopeByLength | None = None
        self._aux_layers: Sequence[nn.Module] = ()
        self._aux_layer_ids: tuple[int, ...] = ()
        self._drafter_layer: DrafterLayer | None = None
        self._lora: LoraStacks | None = None
        self.compiled_parts: Sequence[CompiledPart] = ()
        self.lock: Any = _LOCKS.setdefault(parts.model, threading.RLock())
        self._index: Tensor | None = None  # this and the next two hold something only during a call
        self._head_inputs: tuple[Tensor, ...] = ()
        self._aux_outputs: tuple[Tensor, ...] = ()

    @property
    def attends_in_chunks(self) -> bool:
        """Whether any layer of the model attends within chunks of positions."""
        return bool(self._kinds.chunk_sizes)

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, ChunkEnds | None]:
        """Run a batch through the model, and return what `ForwardOutput` has of it."""

    def read_aux_hidden(self, layers: Sequence[nn.Module], layer_ids: tuple[int, ...]) -> None:
        """Append the outputs of these layers to the hidden states of all later calls."""
        self._aux_layers, self._aux_layer_ids = layers, layer_ids

    def store_drafter_layer(self, layer: DrafterLayer | None) -> None:
        """Store a drafter's keys and values of all tokens of later calls, in caches that have a layer for them."""
        self._drafter_layer = layer

    def rotate_by(self, rope: RopeByLength | None, context: int | None) -> None:
        """Rotate the tokens of all later calls by the lengths of their texts, where `rope` depends on these."""
        self._rope, self._context = rope, context

    def apply_adapters(self, stacks: LoraStacks) -> None:
        """Let the adapters in these stacks take part in later calls, for the rows of a cache that has any."""
        self._lora = stacks

    def _call_model(self, ids: Tensor, positions: Tensor, cache: Any, **arguments: Any) -> Any:
        """Call the model; one without attention takes no positions."""
        if self._kinds.by_name:
            arguments["position_ids"] = positions
        arguments[self._cache_argument] = cache
        return self._model(input_ids=ids, use_cache=cache is not None, **arguments)

    @abstractmethod
    def _select(self, hidden: Tensor) -> Tensor:
        """Pick from hidden states the tokens that `self._index` names."""

    def _mixing(self, batch: ForwardBatch, *, padded: bool = False) -> AbstractContextManager[None]:
        """Have the model's mixers go level by level, or row by row where the tree is part of prompts."""
        if not self._mixers:
            return nullcontext()
        states = batch.cache.states
        assert states is not None, "a model with mixers has states"
        return replaced_mixers(self._mixers, mixer_plan(batch.tree, batch.length, states, batch.pieces, padded=padded))

    def _kept_columns(self, adapters: Tensor | None) -> Tensor | None:
        """Return which columns of the adapters' stacks each token keeps; None where no row has an adapter."""
        if adapters is None:
            return None
        assert self._lora is not None, "an adapter is loaded before a row has it"
        return self._lora.keep(adapters)

    def _adapt(self, patch: ModelPatch, keep: Tensor | None) -> None:
        """Apply adapters to a forward whose tokens keep these columns; None for the model alone."""
        if keep is not None:
            assert self._lora is not None
            self._lora.apply(patch, keep)

    def _start_recording(self, index: Tensor | None) -> None:
        self._index, self._head_inputs, self._aux_outputs = index, (), ()

    def _recorded_hidden(self) -> Tensor:
        """Return the hidden states of all tokens of a forward, joined to `[..., F]`, and forget them."""
        if len(self._head_inputs) != 1:
            raise UnsupportedError(
                f"{type(self._model).__name__} calls its head {len(self._head_inputs)} times a forward; it must be once"
            )
        # A compiled forward is made anew when the ids change; that other layers have hooks it would not see.
        assert len(self._aux_outputs) == len(self._aux_layer_ids)
        hidden = join_hidden(self._head_inputs[0], self._aux_outputs)
        self._start_recording(None)
        return hidden

    @contextmanager
    def _recording(self, *, threads_apart: bool = True) -> Iterator[ModelPatch]:
        """Patch the model for a forward that records hidden states; the lock is held."""
        try:
            with ModelPatch(threads_apart=threads_apart) as patch:
                patch.hook(self._head, self._record_head_input, before=True)
                patch.watch(self._aux_layers, self._record_aux_output)
                run_uncompiled(patch, self.compiled_parts)
                yield patch
        finally:
            self._start_recording(None)

    def _record_head_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Record the hidden states of all tokens, and pass only those of selected ones on to the LM head.

        This is a forward pre-hook of the head, so logits are computed for these tokens alone.
        """
        self._head_inputs = (*self._head_inputs, args[0])
        return (self._select(args[0]), *args[1:])

    def _record_aux_output(self, output: Tensor) -> None:
        self._aux_outputs = (*self._aux_outputs, output)


class PaddedForward(TreeForward):
    """A causal LM's forward over trees side by side, `[B, M]` new nodes, on a dense cache."""

    def __init__(self, parts: ModelParts, device: torch.device, dtype: torch.dtype):
        """Make the forward of a model with its embedding on `device` and hidden states of `dtype`."""
        super().__init__(parts)
        self._device, self._dtype = device, dtype
        self._alibi = any(has_alibi(module) for module in parts.traits.slot_readers)

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, None]:
        """Run new nodes of trees through the model; see `TreeForward`."""
        tree, length, cache, new, places = batch.tree, batch.length, batch.cache, batch.tree.new, batch.places
        assert batch.chunks is None, "chunks are read on a paged cache"
        cache.write_after(length + (tree.tokens.shape[1] - new), new)
        positions = places if batch.position_shift is None else batch.positions
        slots = TreeSlots(length, tree.depth, tree.ancestors, cache.window)
        keep = self._kept_columns(None if batch.adapters is None else batch.adapters[:, None].expand(-1, new))
        with self.lock, self._recording() as patch, self._mixing(batch, padded=True):
            self._adapt(patch, keep)
            answer_by_position(patch, self._slot_readers, lambda: places, slots)
            if self._rope is not None:
                at_least = torch.zeros_like(length) if batch.rope_lengths is None else batch.rope_lengths
                self._rope.apply(patch, lambda: at_least[:, None])
            self._start_recording(batch.logits_index)
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
            self._drafter_layer.write(cache, cache.written_slots(self._device), *flat)
        if batch.logits_index is not None:
            hidden = _take(hidden, batch.logits_index)
        return out.logits.to(self._device), hidden, None

    def read_whole(
        self,
        ids: Tensor,
        inputs: Mapping[str, Any],
        past: DynamicCache,
        adapters: Tensor | None = None,
        prompt: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Read one text as the model itself does, all of it at once.

        `past` is a cache of transformers' own with what comes before; all tokens have the rope of at least `prompt`
        tokens. Returns logits `[1, V]` of the last token, and hidden states of all, `[1, P, F]`.
        """
        keep = self._kept_columns(None if adapters is None else adapters[:, None].expand_as(ids))
        with self.lock, self._recording() as patch:
            self._adapt(patch, keep)
            if self._rope is not None:
                self._rope.apply(patch, lambda: torch.tensor([[prompt]], device=ids.device))
            self._start_recording(torch.tensor([ids.shape[1] - 1], device=ids.device))
            out = self._model(input_ids=ids, past_key_values=past, use_cache=True, **inputs)
            hidden = self._recorded_hidden().to(self._device)
        return out.logits[:, -1].to(self._device), hidden

    def _select(self, hidden: Tensor) -> Tensor:
        return hidden if self._index is None else _take(hidden, self._index.to(hidden.device))

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
