"""The base class of forwards over token trees, their hooks, and the padded forward, which serves every model.

The padded forward has all rows side by side in one batch, on a dense cache, with a 4-D mask over the model's attention.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from redrafter.attention.mask import TreeSlots, additive_mask
from redrafter.attention.tree_attention import stacked_attention
from redrafter.attention.tree_plan import ChunkEnds
from redrafter.cache.dense import CACHE_NAME, DenseCache, cache_argument
from redrafter.errors import UnsupportedError
from redrafter.features import ADAPTERS, IMAGES, ROPE_BY_LENGTH, FeatureSet
from redrafter.kernels.cpu.decoder_layer import MAX_TOKENS
from redrafter.kernels.cpu.rms_norm import fast_forward
from redrafter.model.decoder_layers import FastLayers
from redrafter.model.forward_batch import DrafterLayer, ForwardBatch, join_hidden
from redrafter.model.lora import AdapterSlots
from redrafter.model.patch import CompiledPart, ModelPatch, in_other_thread
from redrafter.model.positions import RopeByLength, answer_by_position, has_alibi
from redrafter.model.quantized_layers import GroupedLinear
from redrafter.model.recurrent_layers import mixer_plan, replace_mixers
from redrafter.model.shared_model import SharedModel
from redrafter.model.supported import Support
from redrafter.model.traits import ModelTraits
from redrafter.parallel.ranks import Ranks


class BoundModel:
    """Facts about a causal LM that is being bound, or is bound. Its forwards read them at each call.

    Attributes:
        name: The model's class, for messages.
        model: The Hugging Face model, in eval mode.
        config: The config of its decoder.
        embedding: Its embedding table.
        head: Its language-modelling head.
        device: Device of the embedding table; all that is returned is there.
        dtype: Dtype of its hidden states.
        hidden_size: D, the width of what its head reads.
        vocab_size: V, the ids that the config counts.
        context: Positions that the model distinguishes; None when it names no limit.
        traits: Properties of its layers.
        ranks: The processes that compute the model together, each its own heads.
        features: Its features that others may exclude, such as batch invariance.
        shared: The state that all targets on the model share.
        lock: Its lock, held while anything is set on the model.
        compiled_parts: Parts that the model's owner has compiled, which run uncompiled in our calls: they
            know neither the hooks nor the shapes of these.
        rope: Its rope, where the frequencies follow from the length of a text; else None.
        fixed_rope_context: Tokens of a text up to which its rope frequencies never change, or its context; None for no
            limit.
        aux_layers: Decoder layers whose outputs follow the last hidden states; None before a drafter reads some.
        aux_modules: These layers.
        drafter_layer: What a drafter stores of every token in addition to the model's keys and values, or None.
        adapters: LoRA adapters that are loaded for it.
        varlen: Whether the model is decoded by the varlen forward, on a paged cache and in captured steps. Whoever
            spreads it over processes, or wants it on a CPU, says otherwise.
        image_arguments: Names of `generate`'s arguments for images; empty for a text-only model.
    """

    name: str
    model: Any
    config: Any
    embedding: Any
    head: Any
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    vocab_size: int
    context: int | None
    traits: ModelTraits
    ranks: Ranks
    features: FeatureSet
    compiled_parts: Sequence[CompiledPart] = ()
    rope: RopeByLength | None = None
    fixed_rope_context: int | None = None
    aux_layers: tuple[int, ...] | None = None
    aux_modules: Sequence[nn.Module] = ()
    drafter_layer: DrafterLayer | None = None
    adapters: AdapterSlots
    varlen: Support
    image_arguments: frozenset[str]

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval()
        self.shared = SharedModel.of_model(model)
        self.lock: Any = self.shared.lock


class TreeForward(ABC):
    """A causal LM's forward over the new nodes of token trees. It leaves nothing on the model between calls."""

    def __init__(self, bound: BoundModel):
        """Make the forward of a model whose traits are known."""
        self.bound, traits = bound, bound.traits
        self._kinds = traits.kinds
        self._slot_readers = traits.slot_readers
        self._mixers = traits.mixers
        self._cache_argument = cache_argument(bound.model.forward) or CACHE_NAME
        self._thread = 0  # the one that runs the forward
        self._index: Tensor | None = None  # `[B, R]` int64; this and the next three hold something only during a call
        self._written: DenseCache | None = None  # the cache that the model writes to
        self._head_inputs: tuple[Tensor, ...] = ()
        self._aux_outputs: tuple[Tensor, ...] = ()

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, ChunkEnds | None]:
        """Run a batch through the model, and return logits, hidden states and ends of chunks as in `ForwardOutput`."""

    def _call_model(self, ids: Tensor, positions: Tensor, cache: Cache | None, **arguments: object) -> Any:
        """Call the model; one without attention takes no positions."""
        if self._kinds.by_name:
            arguments["position_ids"] = positions
        arguments[self._cache_argument] = cache
        return self.bound.model(input_ids=ids, use_cache=cache is not None, **arguments)

    @contextmanager
    def _recording(self) -> Iterator[ModelPatch]:
        """Patch the model for a forward that records hidden states; the lock is held."""
        try:
            with ModelPatch() as patch:
                self._thread = threading.get_ident()
                patch.hook(self.bound.head, self._record_head_input, before=True, guarded=False)
                for layer in self.bound.aux_modules:
                    patch.hook(layer, self._record_aux_output, guarded=False)
                if self.bound.compiled_parts:
                    patch.run_uncompiled(self.bound.compiled_parts)
                yield patch
        finally:
            self._index = None
            self._written = None
            self._head_inputs = ()
            self._aux_outputs = ()

    def _record_head_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Record the hidden states of all tokens, and pass only selected ones on to the LM head.

        This is a forward pre-hook of the head, so logits are computed for these tokens alone.
        """
        if in_other_thread(self._thread):
            return None  # it is a forward of another thread, which computes what the model alone gives
        hidden, index = args[0], self._index
        if self._written is not None and (sums := self._written.sums) is not None:
            # The cache holds zeros for values that were not finite, which would make the nodes' logits look finite.
            hidden = hidden.masked_fill(~sums.isfinite().to(hidden.device)[..., None], torch.nan)
        self._head_inputs = (*self._head_inputs, hidden)
        if index is None:
            return hidden, *args[1:]
        return hidden.gather(1, index.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])), *args[1:]

    def _record_aux_output(self, _: nn.Module, __: object, output: Any) -> None:
        if in_other_thread(self._thread):
            return
        self._aux_outputs = (*self._aux_outputs, output[0] if isinstance(output, tuple) else output)

    def _recorded_hidden(self) -> Tensor:
        """Return the hidden states of all tokens of a forward, joined to `[..., F]`, and forget them."""
        if len(self._head_inputs) != 1:
            message = f"{type(self.bound.model).__name__} calls its head {len(self._head_inputs)} times, not once"
            raise UnsupportedError(message)
        # A compiled forward is rebuilt when the ids change; that other layers have hooks it would not see.
        assert len(self._aux_outputs) == len(self.bound.aux_layers or ())
        hidden = join_hidden(self._head_inputs[0], self._aux_outputs)
        self._index, self._head_inputs, self._aux_outputs = None, (), ()
        return hidden


class PaddedForward(TreeForward):
    """A causal LM's forward over trees side by side, `[B, M]` new nodes, on a dense cache."""

    def __init__(self, bound: BoundModel):
        """Make the forward of a model whose traits are known."""
        super().__init__(bound)
        self._alibi = any(has_alibi(module) for module in self._slot_readers)
        modules = list(bound.model.modules())
        self._grouped = any(isinstance(module, GroupedLinear) and module.weight.is_cpu for module in modules)
        self._layers: FastLayers | None = None
        self._moved = 0  # how often weights had moved when the layers were found
        norms = [(module, fast_forward(module)) for module in modules] if self._grouped else []
        self._norms = [(module, forward) for module, forward in norms if forward is not None]

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, None]:
        """Run new nodes of trees through the model; see `TreeForward`."""
        bound = self.bound
        tree = batch.tree
        length = batch.length
        cache = batch.cache
        places = batch.places
        assert isinstance(cache, DenseCache), "a padded forward writes to a dense cache"
        assert batch.chunks is None, "chunks are read on a paged cache"
        new, mixing = tree.new, None
        nodes = tree.tokens.shape[1]
        cache.write_after(length + (nodes - new), new, drafts=nodes > 1 and batch.pieces is None)
        shift = batch.inputs.get(IMAGES)
        positions = places if shift is None else places + shift[:, None]
        if bound.context is not None:
            # Nodes past the end of the context are never kept; they only must not index past a table.
            positions = positions.clamp(max=bound.context - 1)
        index = None if batch.logits_index is None else batch.logits_index[:, None]
        slots = TreeSlots(length, tree.depth, tree.ancestors, cache.window)
        with bound.lock, self._recording() as patch:
            computed: Set[nn.Module] = set()  # modules that are not called
            if self._grouped and not self._slot_readers and batch.inputs.get(ADAPTERS) is None:
                layers, alike = self._fast_layers(), len(self._kinds.by_name) == 1
                if layers.add_to(patch, alike=alike, recorded=bound.aux_modules) and places.numel() <= MAX_TOKENS:
                    computed = layers.parts
            if self._mixers:
                mixing = mixer_plan(batch, padded=True)
                replace_mixers(patch, self._mixers, mixing)
            if (adapters := batch.inputs.get(ADAPTERS)) is not None:
                bound.adapters.stacks.add_to(patch, bound.adapters.stacks.keep(adapters[:, None].expand(-1, new)))
            if self._slot_readers:
                answer_by_position(patch, self._slot_readers, lambda: places, slots)
            if bound.rope is not None:
                at_least = batch.inputs.get(ROPE_BY_LENGTH, torch.zeros_like(length))
                bound.rope.add_to(patch, lambda: at_least[:, None])
            self._index, self._written = index, cache
            for module, forward in self._norms:
                if module not in computed and "forward" not in vars(module):
                    patch.put(vars(module), "forward", forward)
            mask = None if cache.committed else self._mask(slots)
            # Not under another name, as models that look for "sdpa" in their config would give it other masks.
            if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward and bound.device.type == "cpu":
                patch.put(ALL_ATTENTION_FUNCTIONS, "sdpa", stacked_attention)
            out = self._call_model(tree.tokens[:, -new:], positions, cache, attention_mask=mask)
            hidden = self._recorded_hidden().to(bound.device)  # [B, M, F]
        if mixing is not None:
            mixing.finish()
        if bound.drafter_layer is not None:
            # Steps without drafts seldom need the entries: those of many tokens take as long as those of one.
            layer = bound.drafter_layer
            (layer.write_later if nodes == 1 else layer.write)(
                cache,
                cache.written[bound.device],
                lambda: batch.slots()[1],
                tree.tokens[:, -new:].flatten(),
                places.flatten(),
                hidden.flatten(0, 1),
            )
        if index is not None:
            hidden = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))
        return out.logits.to(bound.device), hidden, None

    def forget_fast(self) -> None:
        """Find the layers that the kernel computes again, after the model's weights or code have changed."""
        self._layers = None

    def _fast_layers(self) -> FastLayers:
        if self._layers is None or self._moved != self.bound.shared.moved:
            self._layers, self._moved = FastLayers(self.bound.model), self.bound.shared.moved
        return self._layers

    def read_whole(
        self, ids: Tensor, inputs: dict[str, Any], past: DynamicCache, adapters: Tensor | None = None, prompt: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Read one text as the model itself does, all of it at once.

        `past` is a cache of transformers' own with what comes before; all tokens have the rope of at least `prompt`
        tokens. Returns logits `[1, V]` of the last token, and hidden states of all, `[1, P, F]`.
        """
        bound = self.bound
        with bound.lock, self._recording() as patch:
            if adapters is not None:
                bound.adapters.stacks.add_to(patch, bound.adapters.stacks.keep(adapters[:, None].expand_as(ids)))
            if bound.rope is not None:
                bound.rope.add_to(patch, lambda: torch.tensor([[prompt]], device=ids.device))
            self._index = torch.tensor([[ids.shape[1] - 1]], device=ids.device)
            given: dict[str, Cache] = {self._cache_argument: past}
            out = bound.model(input_ids=ids, use_cache=True, **given, **inputs)
            hidden = self._recorded_hidden().to(bound.device)
        return out.logits[:, -1].to(bound.device), hidden

    def _mask(self, slots: TreeSlots) -> Tensor | dict[str, Tensor | None] | None:
        """Return the additive mask `[B, 1, M, S]`, one by name where kinds differ; with ALiBi, ones `[B, S]`.

        It is None for a model without attention.
        """
        if self._alibi:
            return torch.ones_like(slots.positions)
        masks: dict[str, Tensor | None] = {
            name: additive_mask(slots.seen(kind), self.bound.dtype) for name, kind in self._kinds.by_name.items()
        }
        if len(masks) < 2:
            return next(iter(masks.values()), None)
        return {"linear_attention": None, "conv": None} | masks  # mixers are given no padding to mask
