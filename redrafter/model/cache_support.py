"""The caches that a model's token trees are right on, found by self-tests when the model is bound."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from redrafter import kernels
from redrafter.cache.dense import DenseCache
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.errors import UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.model.positions import masks_slots
from redrafter.model.prompt_reader import PromptReader
from redrafter.model.self_test import SelfTest
from redrafter.model.supported import Support, stored_shapes
from redrafter.model.traits import ModelTraits

if TYPE_CHECKING:
    from redrafter.model.target import Target

MAX_CHEAP_WINDOW = 64  # positions; prompts of the self-test reach past a window up to this long
# Of the longer prompt: more than convolutions look back, and such that no piece of a prompt has one token, which some
# mixers compute otherwise.
MIN_TOKENS_WITH_STATES = 10


class CacheSupport:
    """The caches that a model's token trees are right on.

    Attributes:
        shapes: What each layer stores on a dense cache.
    """

    def __init__(
        self,
        target: "Target",
        traits: ModelTraits,
        reader: PromptReader,
    ):
        """Run the self-test on dense caches, in the fastest way that the model is right in.

        Args:
            target: What is being bound.
            traits: What its layers are.
            reader: Its reader of prompts, which is set to that way.

        Raises:
            UnsupportedError: The model is right on no cache.
        """
        self._target, self._traits = target, traits
        kinds, mixers = traits.kinds, traits.mixers
        window = min((kind.window for kind in kinds.by_name.values() if kind.window), default=0)
        longest = window + 3 if window <= MAX_CHEAP_WINDOW else 5
        longest = max(longest, MIN_TOKENS_WITH_STATES) if mixers else longest
        self._self_test = SelfTest(target, kinds, longest, decoded=bool(mixers))
        states = [state for mixer in mixers for state in mixer.states]
        self.shapes = stored_shapes(self._self_test.output, target.config, target.name, states)
        self._contiguous = False
        on_cpu = all(shape.device.type == "cpu" for shape in self.shapes)
        reader.use_masks_on_dense_cache(not (traits.attention.kinds and on_cpu))
        self._settle_dense(reader)

    def new_dense(self, rows: int, shapes: Sequence[LayerShape]) -> DenseCache:
        """Return an empty dense cache for `rows` rows, of layers with these shapes."""
        return DenseCache(shapes, rows, self._contiguous)

    def _settle_dense(self, reader: PromptReader) -> None:
        """Find the fastest way on a dense cache: without masks for prompts, then with them, then with copied keys."""
        try:
            self._self_test.run(self.shapes, self._reserved_dense)
        except UnsupportedError as error:
            if reader.reads_without_masks(self.new_dense(1, self.shapes)):
                reader.use_masks_on_dense_cache(True)  # its attention cannot be replaced
            elif isinstance(error.__cause__, RuntimeError) and not self._contiguous:
                self._contiguous = True
            else:
                raise
            self._settle_dense(reader)

    @cached_property
    def paged_shapes(self) -> list[LayerShape]:
        """What each layer stores on a paged cache: the keys and values that its attention function receives.

        Models with latent attention store something else in transformers' own caches.
        """
        seen = self._traits.attention.shapes
        nothing = next(iter(seen.values()), self.shapes[0]).storing_nothing()
        return [replace(seen.get(layer, nothing), states=shape.states) for layer, shape in enumerate(self.shapes)]

    @cached_property
    def paged(self) -> Support:
        """Whether the model can be decoded on a paged cache. The first access may run the self-test on one."""
        target, probe = self._target, self._traits.attention
        if len({shape.device for shape in self.shapes}) > 1:
            return Support("it is spread over several devices; load it on one with device='cuda'")
        if target.device.type == "cuda" and not kernels.TRITON:
            return Support("Triton is not installed; pip install triton")
        attends = any(shape.heads for shape in self.shapes)
        if attends and (probe.failure is not None or not probe.shapes):
            reason = probe.failure or "no layer attends through transformers' attention interface"
            return Support(f"its attention cannot be replaced: {reason}")
        if any(shape.index_dim for shape in self.shapes):
            return Support(
                "an indexer chooses what its layers attend to, and the paged cache has no place for its keys"
            )
        if attends and self._traits.kinds.by_layer is None:
            return Support("what its layers see is not known")
        if masks_slots(self._traits.slot_readers):  # in code of its own
            return Support("its attention takes positions from slots of the cache")
        try:
            with torch.no_grad():
                stored = [replace(shape, source=None) for shape in self.paged_shapes]
                self._self_test.run(self.paged_shapes, self._new_paged, far=stored == self.shapes)
        except UnsupportedError as error:
            return Support(f"its attention cannot be replaced: {error}")
        return Support()

    def _reserved_dense(self, shapes: Sequence[LayerShape], rows: int, slots: int) -> DenseCache:
        cache = DenseCache(shapes, rows, self._contiguous)
        cache.reserve(slots)
        return cache

    def _new_paged(self, shapes: Sequence[LayerShape], rows: int, slots: int) -> PagedCache:
        blocks = -(-slots // BLOCK_SIZE)
        table = torch.arange(1, 1 + rows * blocks, dtype=torch.int32, device=self._target.device).view(rows, blocks)
        home = torch.arange(1, 1 + rows, device=table.device)
        return PagedCache(KVCachePool(shapes, 1 + rows * blocks, rows), table, home)
