"""A Hugging Face causal LM that verifies token trees.

The model is used as it is: no forked modelling code, nothing stored on it. When a target is bound, small trees are
compared with causal forwards; an architecture whose answers differ is refused, so a bound model is exact.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from redrafter import features
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import KVCache, LayerShape
from redrafter.cache.to_device import made_on_host, on_device
from redrafter.errors import ArgumentError, MismatchError, UnsupportedError, first_line
from redrafter.files.dtype_names import dtype_name
from redrafter.files.home import keep_kernels
from redrafter.model import supported
from redrafter.model.batch_invariance import RowByRow, check_products, check_rows, small_pool, support_of
from redrafter.model.forward_batch import DrafterLayer, ForwardBatch, ForwardOutput, Prompts, decoder_layers
from redrafter.model.images import ImageReader, image_arguments, token_type_arguments
from redrafter.model.linear_layers import is_quantized, warn_of_rounding
from redrafter.model.lora import AdapterSlots
from redrafter.model.passed_tests import NONE_PASSED, PassedTests
from redrafter.model.patch import MODEL_ERRORS, ModelPatch, ModelState, hooked_module
from redrafter.model.positions import find_dynamic_rope, find_switching_rope
from redrafter.model.prompt_reader import PromptReader, ShowLogits
from redrafter.model.quantized_layers import rounds_inputs
from redrafter.model.self_test import CacheSupport
from redrafter.model.shared_model import Revision
from redrafter.model.traits import learn_traits
from redrafter.model.tree_forward import BoundModel, PaddedForward
from redrafter.model.varlen_forward import VarlenForward
from redrafter.parallel.local_shards import use_local_shards
from redrafter.tree.token_tree import chain


class Target(BoundModel):
    """A causal LM bound for token tree verification; `BoundModel` holds the facts about it.

    Attributes:
        varlen_forward: The forward over a paged cache.
        images: Whether prompts may have images, and their reader.
        prompt_reader: Reads prompts into the cache.
        reread_from: Committed tokens at which rows are read again, as the model's rope switches; None for never.
        image_inputs: `image_arguments`, and the names of the token-type arguments that go with them.
    """

    @supported.name_model_in_errors
    def __init__(self, model: PreTrainedModel, name: str | None = None, passed: PassedTests = NONE_PASSED):
        """Bind a model: learn what its layers attend to, and compare small trees with causal forwards.

        Args:
            model: A loaded causal LM with a language-modelling head. A `PeftModel` is served as the model in it, with
                its adapters.
            name: Its name in messages; None for the name of its class.
            passed: The self-tests that it has passed before.

        Raises:
            UnsupportedError: It is an encoder-decoder, keeps states where they cannot be found, has an attention
                implementation that takes no 4-D mask, or its tree forward differs from its causal one.
        """
        model = supported.base_of(model)
        self.name = name or type(model).__name__
        supported.check_supported(model, self.name)
        self.ranks = use_local_shards(model)
        self.features = features.FeatureSet(self.name)
        self.features.add(features.TENSOR_PARALLELISM, self.ranks.size > 1)
        self.features.add(features.QUANTISED_WEIGHTS, is_quantized(model.config))
        self.features.add(features.FP8_WEIGHTS, rounds_inputs(model))
        super().__init__(model)
        self.config = model.config.get_text_config(decoder=True)
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise UnsupportedError(f"{self.name} has no language-modelling head; load it with AutoModelForCausalLM")
        self.context = context_of(self.config)
        table = self.embedding.weight
        assert isinstance(table, Tensor)
        supported.check_on_device(model, table, self.name)
        self.device = table.device
        if self.device.type == "cuda":
            keep_kernels()  # before the self-test launches the first one
        width = getattr(self.head, "in_features", None)  # of the hidden states that the head reads
        self.hidden_size = width if isinstance(width, int) else supported.config_width(self.config)
        self.vocab_size = self.config.vocab_size
        self._changes = self._replacements = 0  # of weights or code, and those of addresses or code among them
        self._drafter_shapes = tuple[LayerShape, ...]()
        self.image_arguments = image_arguments(model)
        self.image_inputs = self.image_arguments | token_type_arguments(model)
        supported.check_autocast(self.device)
        # Not in inference mode: some quantisers make the weights in the first forward, for good.
        self._state = ModelState.from_model(model)
        with torch.no_grad(), made_on_host(), on_device(self.device), ModelPatch() as patch:
            patch.run_uncompiled(self._state.compiled)
            self._bind(passed)
        warn_of_rounding(model.config, self.name, self.rounding)
        self._bound_as = self._facts()
        self.note_state()

    def _bind(self, passed: PassedTests) -> None:
        """Make the forwards of the model, then run its self-test on the caches that it may be decoded on."""
        # Multiples of a prime are distinct and far apart, so no two tokens of the probe are alike.
        ids = torch.arange(8, device=self.device) * 7919 % self.vocab_size
        self.dtype = self.embedding(ids).dtype  # the model's own may be that of a quantised weight
        self.traits = traits = learn_traits(self.model, self.config, ids, self.name)
        self.features.add(features.RECURRENT_STATES, bool(traits.mixers))
        self.features.add(features.CHUNKED_ATTENTION, bool(traits.kinds.chunk_sizes))
        if not traits.mixers:
            supported.check_states_found(self.model, self.config, self.name)
        if traits.attention.changed:
            layer = min(traits.attention.changed)
            raise UnsupportedError(
                f"{self.name} changes its masks by what a text says (layer {layer}), so which tokens are "
                "seen depends on slots of the cache, and a tree fills others; use a model whose masks follow positions"
            )
        self._padded_forward = PaddedForward(self)
        self.varlen_forward = VarlenForward(self)
        self.prompt_reader = PromptReader(self._padded_forward, self.varlen_forward)
        self._caches = CacheSupport(self, self.prompt_reader, passed)
        self.rounding = self._caches.rounding
        self.features.add(features.INDEXED_ATTENTION, any(shape.extra_dim for shape in self._caches.shapes))
        self.varlen = supported.Support("it is not on a GPU") if self.device.type != "cuda" else self.paged
        dynamic = find_dynamic_rope(self.model)
        if dynamic is not None and self.context is not None:
            self.context = max(self.context, dynamic.context)
        self.rope = dynamic or find_switching_rope(self.model, self.config, self.new_cache(1))
        self.features.add(features.SWITCHING_ROPE, self.rope is not None and dynamic is None)
        self.fixed_rope_context = self.context if self.rope is None else self.rope.switch_at
        self.reread_from = self.rope.switch_at if self.rope is not None and self.rope.rereads else None
        self.images = ImageReader(self, self._caches, self._padded_forward.read_whole)
        self.adapters = AdapterSlots(self, self._try_tokens)
        if self.ranks.size > 1:  # a rank that takes another way than the others would wait for them for ever
            ways = self.paged, self.varlen, [(shape.key_dim, shape.value_dim) for shape in self.shapes]
            self.ranks.check_equal(ways, f"what {self.name} can be decoded on")

    def _facts(self) -> dict[str, object]:
        """Return the properties that may not change once the model is bound, by the message of their change."""
        weight = self.embedding.weight
        return {
            "was changed from {} to {}": dtype_name(weight.dtype),
            "was moved from {} to {}": str(weight.device),
            "was resized from {} ids to {}": len(weight),
            "was given another input embedding": id(self.model.get_input_embeddings()),
            "was given another output embedding": id(self.model.get_output_embeddings()),
        }

    def follow_changes(self) -> None:
        """Detect changes by the model's owner since the last call: weights, hooks, forwards, adapters.

        Raises:
            ArgumentError: The model is another one now, of another dtype, device or vocabulary, or a part of it is in
                training mode.
        """
        with self.lock:  # no forward has set anything on the model now
            now = self._state.again()
            if now != self._state:
                self._follow()
            training = now.training
        if training:
            supported.check_eval(self.model)

    def _follow(self) -> None:
        """Record changes since the last call."""
        before, now = self._state, ModelState.from_model(self.model)
        if (now.memory, now.writes, now.code) != (before.memory, before.writes, before.code):
            for what, fact in self._facts().items():
                if fact != self._bound_as[what]:
                    raise ArgumentError(
                        f"{self.name} {what.format(self._bound_as[what], fact)} after it was bound: make a new engine "
                        "of the model"
                    )
            self._changes += 1
            # In-place writes keep addresses, so fused layers stay valid; replaced tensors or code do not.
            if (now.memory, now.code) != (before.memory, before.code):
                self._replacements += 1
                self.varlen_forward.forget_fused()
                self._padded_forward.forget_fast()
        self.note_state()

    def note_state(self) -> None:
        """Take the model's weights and code as they are now, so that `follow_changes` finds later changes alone."""
        self._state = ModelState.from_model(self.model)
        self.compiled_parts = self._state.compiled

    @property
    def revision(self) -> Revision:
        """The changes so far, of which those by the model's owner count once `follow_changes` has found them."""
        shared = self.shared
        return Revision(self._changes + shared.written, self._replacements + shared.moved, shared.drafters)

    @property
    def asleep(self) -> bool:
        """Whether the engines on the model sleep, so that nothing can be computed with it."""
        return self.shared.parked is not None

    @property
    def hooked(self) -> str | None:
        """The first module that calls a forward hook of the model's owner, for messages; None where none does.

        A hook is Python code, which a captured step would not call and a compiled forward might not.
        """
        return hooked_module(self.model) if self._state.hooked else None

    @property
    def shapes(self) -> list[LayerShape]:
        """Shape of each layer on a dense cache."""
        return [*self._caches.shapes, *self._drafter_shapes]

    @property
    def paged_shapes(self) -> list[LayerShape]:
        """Shape of each layer on a paged cache."""
        return [*self._caches.paged_shapes, *self._drafter_shapes]

    @property
    def paged(self) -> supported.Support:
        """Return whether the model can be decoded on a paged cache. The first access may run a self-test."""
        return self._caches.paged

    def make_batch_invariant(self) -> None:
        """Let a token's logits depend on its text alone from now on, bit for bit, in every engine on this target.

        On a GPU that holds once the forward is compiled, which is when its rows are compared.

        Raises:
            ArgumentError: The model was compiled before.
            UnsupportedError: This model cannot be computed so.
        """
        if features.BATCH_INVARIANCE in self.features:
            return
        self.features.check(features.BATCH_INVARIANCE)
        if self.device.type == "cuda" and self.varlen_forward.linears_fused:
            message = f"{self.name} was compiled for an engine without batch_invariant=True; load the model again"
            raise ArgumentError(message)
        reason = support_of(self).reason or self.paged.reason
        reason = reason or (self.varlen.reason if self.device.type == "cuda" else None)
        if reason:
            raise UnsupportedError(f"{self.name} cannot be batch-invariant: {reason}")
        forward, shapes = self.varlen_forward, self.paged_shapes
        forward.row_by_row = RowByRow(self.model, self.device).add_to
        try:
            check_products(forward, shapes)
            if self.device.type == "cpu":
                check_rows(forward, small_pool(shapes))
        except (UnsupportedError, *MODEL_ERRORS) as error:
            # The target must stay usable as it was, since the caller may continue without the mode.
            forward.row_by_row = None
            if isinstance(error, UnsupportedError):
                raise
            raise UnsupportedError(f"{self.name} cannot be batch-invariant: {first_line(error)}") from error
        self.features.add(features.BATCH_INVARIANCE)
        self.varlen, self.prompt_reader.masks = supported.Support(), True

    def new_cache(self, rows: int) -> DenseCache:
        """Return an empty dense cache for `rows` rows."""
        return self._caches.new_dense(self.shapes, rows)

    @property
    def feature_size(self) -> int:
        """F, the width of the hidden states that `verify` and `prefill` return."""
        return self.hidden_size * (1 + len(self.aux_layers or ()))

    def read_aux_hidden(self, layers: Sequence[int]) -> None:
        """Append the outputs of these decoder layers to all later hidden states, `[..., F]` together.

        Args:
            layers: Their numbers, from 0; none for the last hidden states alone.

        Raises:
            MismatchError: There is no such layer, or another drafter reads other ones.
            UnsupportedError: The layers cannot be found, or their outputs not joined to the last hidden state.
        """
        if self.aux_layers not in (None, tuple(layers)):
            raise MismatchError(
                f"this target's layers {list(self.aux_layers or ())} are read by another drafter, this one reads "
                f"{list(layers)}; load the target again"
            )
        if layers:
            _ = self.paged  # its self-test runs on the first layers alone, and others may be read from now on
        before = self.aux_layers, self.aux_modules
        self.aux_modules = decoder_layers(self.model, self.config.num_hidden_layers, layers)
        self.aux_layers = tuple(layers)
        try:
            if layers:
                with torch.no_grad():
                    self._try_tokens(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        except UnsupportedError:
            self.aux_layers, self.aux_modules = before
            raise

    def _try_tokens(self, tokens: Tensor) -> None:
        """Run tokens `[B, M]` int64 through the model, as the beginnings of B texts."""
        cache = self.new_cache(len(tokens))
        cache.reserve(tokens.shape[1])
        self.verify(ForwardBatch(chain(tokens), torch.zeros_like(tokens[:, 0]), cache))

    def store_drafter_layer(self, layer: DrafterLayer) -> None:
        """Store a drafter's keys and values of every token that is read later, in caches that are made from now on.

        Args:
            layer: The layer that stores it.

        Raises:
            MismatchError: Another drafter stores some already.
        """
        if self.drafter_layer is not None and self.drafter_layer.owner is layer.owner:
            return
        if self.drafter_layer is not None:
            raise MismatchError("another drafter stores keys and values with this target's; load the target again")
        _ = self.paged  # its self-test is of caches without that layer
        self.drafter_layer, self._drafter_shapes = layer, (layer.shape,)

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the new nodes of trees, and chunks of prompts with them, through the model in one forward.

        Nothing is committed.
        """
        forward = self.prompt_reader.forward_on(batch.cache)
        tree = batch.tree if self.rope is None else self.rope.drop_past_switch(batch.tree, batch.length)
        return ForwardOutput(tree, *forward(batch))

    def reread(self, tokens: Tensor, marked: Tensor, cache: KVCache, inputs: Mapping[features.Feature, Tensor]) -> None:
        """Read again rows that have reached the rope switch, with the frequencies of long texts; see `reread_from`.

        Args:
            tokens: The texts of all rows, `[B, P]` int64.
            marked: The rows that are read again, `[B]` bool.
            cache: KV cache of all rows; the rows that are read again are replaced.
            inputs: As in `ForwardBatch`.
        """
        assert self.reread_from is not None, "the model has no rope that switches"
        end, rows = self.reread_from, marked.nonzero()[:, 0]
        if not len(rows):
            return
        with cache.subset(rows, end) as some:
            starts = [0] * len(rows)
            ends = [end] * len(rows)
            long = torch.full_like(rows, end + 1)
            of_rows = {feature: x[rows] for feature, x in inputs.items()} | {features.ROPE_BY_LENGTH: long}
            self.prompt_reader.read_prompts(Prompts(tokens[rows], starts=starts, ends=ends, cache=some, inputs=of_rows))

    def prefill(
        self, prompts: Prompts, *, max_tokens: int | None = None, show: ShowLogits | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read prompts into their cache, in several forwards where they are long.

        Args:
            prompts: The prompts.
            max_tokens: The most tokens of all rows in one forward; None for as many as suit.
            show: Is shown the logits of every token that is read, each row's in order; forwards are then so short that
                their logits are at most `MAX_SHOWN_LOGITS` numbers.

        Returns:
            Logits `[B, V]` and hidden states `[B, F]` of each prompt's last token.
        """
        return self.prompt_reader.read_prompts(prompts, max_tokens=max_tokens, show=show)


def context_of(config: object) -> int | None:
    """Return the number of positions that a config names; None where it names no limit."""
    whole = getattr(config, "max_position_embeddings", None)
    has_table = hasattr(getattr(config, "attn_config", None), "alibi")  # MPT's biases are a table of this length
    table: int | None = getattr(config, "max_seq_len", None) if has_table else None
    return min((limit for limit in (whole, table) if limit is not None), default=None)
