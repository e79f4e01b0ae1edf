"""Any Hugging Face causal LM, asked about token trees.

The model is used as it is: no forked modelling code, nothing stored on it. It gets explicit positions, a 4-D additive
mask (one per kind of attention layer) and a `DenseCache`. When a target is bound, one small tree is compared with
plain forwards; an architecture whose answers differ is refused, so what is served is right.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from redrafter import kernels
from redrafter.attention.mask import additive, visible
from redrafter.attention.positions import by_position, slot_readers
from redrafter.cache.dense import DenseCache, LayerShape
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.errors import MismatchError, UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.target.adapters import base_of
from redrafter.target.attention_probe import probe_attention
from redrafter.target.aux_hidden import decoder_layers, in_this_thread, join, tapped
from redrafter.target.mode_checks import check_autocast
from redrafter.target.quantization import warn_of_shared_scales
from redrafter.target.rope import SwitchingRope, dynamic_context, find_rope, warn_of_dynamic_rope
from redrafter.target.self_test import SelfTest
from redrafter.target.supported import check_supported, explained, head_width, stored_shapes
from redrafter.target.varlen_forward import VarlenForward
from redrafter.tree.token_tree import Tree, chain

__all__ = ["Target", "context_of"]

PREFILL_CHUNK = 512  # prompt tokens of a row per forward that needs a mask; bounds the mask, not the result
PREFILL_TOKENS = 8192  # of all rows; bounds what a forward holds beside the cache
SHOWN_LOGITS = 1 << 25  # numbers of one forward whose logits are all shown: 128 MiB in float32
_OWN_CODE = "no layer attends through transformers' attention interface"


class Target:
    """A causal LM bound for tree verification.

    model: a loaded `PreTrainedModel` with a language-modelling head, in eval mode; a `PeftModel` is served as the model
    in it, with its adapters.
    context: positions the model can tell apart, or None when it names no limit.
    layers: decoder layers whose outputs are part of what is returned as hidden states, once `tap` was called.
    unpacked: why it cannot be decoded packed, on a paged cache; None when it can.
    Raises `UnsupportedError` for encoder-decoders, recurrent or hybrid layers, attention implementations that take no
    4-D mask, and any model whose tree forward differs from its plain one.
    """

    @explained
    def __init__(self, model: PreTrainedModel):
        model = base_of(model)
        self.name = type(model).__name__
        check_supported(model, self.name)
        self.model: Any = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self.embedding: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        if self.head is None:
            raise UnsupportedError(f"{self.name} has no language-modelling head; load it with AutoModelForCausalLM")
        self.context = context_of(self.config)
        warn_of_dynamic_rope(self.config, self.name)
        self.rope: SwitchingRope | None = None
        table = self.embedding.weight
        assert isinstance(table, Tensor)
        self.device = table.device
        self.hidden_size, self.vocab_size = head_width(self.head, self.config), self.config.vocab_size
        self.layers: tuple[int, ...] | None = None
        self._tapped: list[nn.Module] = []
        warn_of_shared_scales(model.config, self.name)
        check_autocast(self.device)
        # Not in inference mode: some quantisers make the weights in the first forward, for good.
        with torch.no_grad():
            self._bind()
        self.rope = self.packed.rope = find_rope(self.model, self.config, self.new_cache(1))

    @property
    def steady_context(self) -> int | None:
        """Positions up to which what a row has in its cache stays valid; None when the model names no limit."""
        return self.context if self.rope is None else self.rope.at

    def new_cache(self, rows: int) -> DenseCache:
        return DenseCache(self.shapes, rows, self._contiguous)

    @property
    def feature_size(self) -> int:
        """F, of a hidden state as it is returned."""
        return self.hidden_size * (1 + len(self.layers or ()))

    def tap(self, layers: Sequence[int]) -> None:
        """From now on, hidden states are `[..., F]`: the last one, and these layers' outputs behind it; see `features`.

        Raises `MismatchError` where there is no such layer, or where another drafter reads other ones.
        """
        if self.layers not in (None, tuple(layers)):
            raise MismatchError(
                f"this target's layers {list(self.layers or ())} are read by another drafter, this one reads "
                f"{list(layers)}; load the target anew"
            )
        self._tapped = decoder_layers(self.model, self.config.num_hidden_layers, layers)
        self._try_layers()
        self.layers = tuple(layers)
        self.packed.tap(self._tapped, self.layers)

    def _try_layers(self) -> None:
        """Raise `UnsupportedError` where the outputs of the layers that were asked for cannot be joined."""
        if not self._tapped:
            return
        nothing = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache = self.new_cache(1)
        cache.reserve(1)
        try:
            with torch.no_grad():
                self.verify(chain(nothing), nothing[0], cache)
        except UnsupportedError:
            self._tapped = []
            raise

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's own embedding table, `[...]` ids to `[..., D]`: what a drafter's recurrence reads."""
        return self.embedding(tokens)

    def clamp_to_vocab(self, tokens: Tensor) -> Tensor:
        """Ids of another model's texts, those that this one's embedding lacks replaced: they stand in no text of its
        own, and any says as much."""
        return tokens.where(tokens < self.vocab_size, 0)

    def verify(
        self,
        tree: Tree,
        length: Tensor,
        cache: DenseCache | PagedCache,
        only: Tensor | None = None,
        text: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One forward over the new nodes of the tree. length: `[B]`, each row's committed tokens. only: `[B]`, compute
        the head at this one of each row's M new nodes instead of at all of them. text: `[B]`, each row's tokens once
        it is read, where this forward reads a part of it; rope may depend on that.

        Returns logits `[B, M, V]` and the hidden states that the head saw, `[B, M, F]`. Nothing is committed.
        """
        long = self._long(length, text)
        if isinstance(cache, PagedCache):
            return self.packed(tree, length, cache, only, long)
        return self._padded(tree, length, cache, only, long)

    def _long(self, length: Tensor, text: Tensor | None) -> Tensor | None:
        """Return whose rope is that of long texts, `[B]` bool, where rope switches; see `verify`."""
        if self.rope is None:
            return None
        return (length >= self.rope.at) if text is None else (text > self.rope.at)

    def kept(self, tree: Tree, length: Tensor) -> Tree:
        """The tree as far as its tokens can be accepted behind rows of `length` `[B]` committed tokens."""
        return tree if self.rope is None else self.rope.kept(tree, length)

    def reread(self, tokens: Tensor, length: Tensor, active: Tensor, cache: DenseCache | PagedCache) -> None:
        """Read those rows anew whose text is about to become longer than the context that its cache is valid for.

        Args:
            tokens: `[B, T]`, each row's text.
            length: `[B]`, committed tokens.
            active: `[B]` bool, the rows that go on.
        """
        assert self.rope is not None and self.rope.rereads
        rows = ((length == self.rope.at) & active).nonzero()[:, 0]
        if not len(rows):
            return
        upto = length[rows]
        with cache.subset(rows, self.rope.at) as part:
            self._read(tokens[rows], upto, part, upto + 1, new=self.rope.at)

    def rereads(self, longest: int) -> bool:
        """Whether `reread` may be due, when the longest row has so many committed tokens."""
        return self.rope is not None and self.rope.rereads and longest >= self.rope.at

    def prefill(
        self,
        prompts: Tensor,
        length: Tensor,
        cache: DenseCache | PagedCache,
        *,
        start: Tensor | None = None,
        new: int | None = None,
        most: int | None = None,
        show: Callable[[int, int, Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read prompts `[B, P]`, right-padded to any ids, of `length` `[B]` tokens, in chunks.

        start: `[B]`, tokens that the cache already holds, fewer than `length`; new: the most that a row has beyond.
        most: tokens of all rows in one forward, at most; None: as many as suit.
        show: is called with a row, a position in it and the logits `[n, V]` of the n tokens from there on, until it
            was shown every token that is read, each row's in order. The forwards are then so short that their logits
            are at most `SHOWN_LOGITS` numbers.
        Returns the last prompt token's logits `[B, V]` and hidden `[B, F]`.
        """
        if show is not None:
            most = min(most or PREFILL_TOKENS, max(SHOWN_LOGITS // self.vocab_size, 1))
        return self._read(prompts, length, cache, length, start=start, new=new, most=most, show=show)

    def _read(
        self,
        prompts: Tensor,
        length: Tensor,
        cache: DenseCache | PagedCache,
        text: Tensor,
        *,
        start: Tensor | None = None,
        new: int | None = None,
        most: int | None = None,
        show: Callable[[int, int, Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read as `prefill` does. text: `[B]`, see `verify`."""
        start = torch.zeros_like(length) if start is None else start
        if self.device.type == "cpu" and self._layer_kinds and (isinstance(cache, PagedCache) or self._unmasked):
            long = self._long(length, text)
            return self.packed.read(prompts, start, length, cache, self._layer_kinds, most, long, show)
        new = prompts.shape[1] if new is None else new
        return self._read_masked(prompts, start, length, cache, text, new, most or PREFILL_TOKENS, show)

    def _read_masked(
        self,
        prompts: Tensor,
        start: Tensor,
        length: Tensor,
        cache: DenseCache | PagedCache,
        text: Tensor,
        new: int,
        most: int,
        show: Callable[[int, int, Tensor], object] | None,
    ) -> tuple[Tensor, Tensor]:
        """Read as `prefill` does, with any model on any device: each chunk is a chain, with its mask."""
        rows, width = prompts.shape
        chunk = max(min(PREFILL_CHUNK, most // rows), 1)
        logits = hidden = None
        for offset in range(0, new, chunk):
            size = min(chunk, new - offset)
            behind = start + offset  # [B]
            at = behind[:, None] + torch.arange(size, device=length.device)  # [B, size]
            piece = chain(prompts.gather(1, at.clamp(max=width - 1)))
            last = length - 1 - behind  # [B], the node of the last prompt token, if it is here
            here = ((last >= 0) & (last < size))[:, None]  # [B, 1]
            end = last.clamp(0, size - 1)
            found = self.verify(piece, behind, cache, end if show is None else None, text)
            if show is not None:
                counts = (last + 1).clamp(0, size).tolist()
                for row, first, count in zip(range(rows), behind.tolist(), counts, strict=True):
                    show(row, first, found[0][row, :count])
            at_end = found if show is None else (x.gather(1, end[:, None, None].expand_as(x[:, :1])) for x in found)
            new_logits, new_hidden = (x.squeeze(1) for x in at_end)
            logits = new_logits if logits is None else torch.where(here, new_logits, logits)
            hidden = new_hidden if hidden is None else torch.where(here, new_hidden, hidden)
        assert logits is not None and hidden is not None, "a prompt has at least one token"
        return logits, hidden

    def _padded(
        self, tree: Tree, length: Tensor, cache: DenseCache, only: Tensor | None, long: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        read: list[Tensor] = []
        outputs: list[Tensor] = []

        def wanted(hidden: Tensor) -> Tensor:
            if only is None:
                return hidden
            return hidden.gather(1, only.to(hidden.device)[:, None, None].expand(-1, 1, hidden.shape[-1]))

        @in_this_thread
        def tap(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            read.append(wanted(args[0]))
            return (read[-1], *args[1:])

        @in_this_thread
        def see(output: Tensor) -> None:
            outputs.append(wanted(output).to(self.device))

        nodes, new = tree.tokens.shape[1], tree.new
        cache.write_after(length + (nodes - new), new)
        positions = length[:, None] + tree.depth[:, -new:]
        hook = self.head.register_forward_pre_hook(tap)
        seen = partial(visible, length, tree.depth, tree.ancestors, cache.window)
        try:
            with (
                self.packed.lock,  # which changes the attention of the model
                tapped(self._tapped, see),
                by_position(self._slot_readers, positions, seen),
                self._rope(long, new),
            ):
                out = self.model(
                    input_ids=tree.tokens[:, -new:],
                    attention_mask=None if cache.committed else self._mask(tree, length, cache.window),
                    # Nodes past the end of the context are never kept; they only must not index past a table.
                    position_ids=positions if self.context is None else positions.clamp(max=self.context - 1),
                    past_key_values=cache,
                    use_cache=True,
                )
        finally:
            hook.remove()
        if len(read) != 1:
            raise UnsupportedError(f"{self.name} calls its head {len(read)} times a forward; it must be once")
        return out.logits.to(self.device), join(read[0].to(self.device), outputs)

    def _rope(self, long: Tensor | None, new: int) -> AbstractContextManager[None]:
        if self.rope is None or long is None:
            return nullcontext()
        tokens = long[:, None].expand(-1, new)  # [B, M]
        return self.rope.choosing(lambda: tokens)

    def _mask(self, tree: Tree, length: Tensor, window: int) -> Tensor | dict[str, Tensor]:
        masks = {
            name: additive(visible(length, tree.depth, tree.ancestors, window, kind), self.dtype)
            for name, kind in self.kinds.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _bind(self) -> None:
        """Learn what each layer sees and stores, then compare small trees with plain forwards."""
        ids = torch.arange(8, device=self.device) * 7919 % self.vocab_size
        self.dtype = self.embed(ids).dtype  # the model's own may be that of a quantised weight
        probe = probe_attention(self.model, self.config, ids)
        if probe.changed:
            raise UnsupportedError(
                f"{self.name} changes its masks by what a text says (layer {min(probe.changed)}), so which tokens are "
                "seen depends on slots of the cache, and a tree fills others; use a model whose masks follow positions"
            )
        self.kinds = probe.by_name(self.config)
        self._probe, self._slot_readers = probe, slot_readers(self.model)
        self._layer_kinds = probe.by_layer(self.config.num_hidden_layers)
        self.packed = VarlenForward(self.model, self.head, self.config, self.context, probe.windows, self._slot_readers)
        window = min((kind.window for kind in self.kinds.values() if kind.window), default=0)
        longest = window + 3 if window <= 64 else 5  # reach past the window where that is cheap
        self._self_test = SelfTest(self, probe, longest)
        self.shapes = stored_shapes(self._self_test.output, self.config, self.name)
        self._unmasked = bool(probe.kinds) and all(shape.device.type == "cpu" for shape in self.shapes)
        self._contiguous = False
        self._try_dense()
        self.unpacked = "it is not on a GPU" if self.device.type != "cuda" else self.unpaged

    def _try_dense(self) -> None:
        """Run the self-test on the dense cache in the fastest way that this model is right in."""
        try:
            self._self_test.run(self.shapes, self._ragged_cache)
        except UnsupportedError as error:
            if self._unmasked:
                self._unmasked = False  # its attention cannot be replaced: prompts are read by its own
            elif isinstance(error.__cause__, RuntimeError) and not self._contiguous:
                self._contiguous = True
            else:
                raise
            self._try_dense()

    @cached_property
    def paged_shapes(self) -> list[LayerShape]:
        """What each layer keeps on a paged cache: what it attends to. Models with latent attention keep something else
        in transformers' own caches."""
        seen = self._probe.shapes
        nothing = next(iter(seen.values())).storing_nothing()
        return [seen.get(layer, nothing) for layer in range(self.config.num_hidden_layers)]

    @cached_property
    def unpaged(self) -> str | None:
        """Why this model can only be decoded on the dense cache; None when the paged one serves too."""
        if len({shape.device for shape in self.shapes}) > 1:
            return "it is spread over several devices; load it on one with device='cuda'"
        if self.device.type == "cuda" and not kernels.TRITON:
            return "Triton is not installed; pip install triton"
        if self._probe.failure is not None or not self._probe.shapes:
            return f"its attention cannot be replaced: {self._probe.failure or _OWN_CODE}"
        if self._layer_kinds is None:
            return "what its layers see is not known"
        if self._slot_readers:
            return "its attention takes positions from the cache"
        if any(kind.chunk for kind in self._layer_kinds):
            return "its layers attend within chunks, which the tree attention kernel does not know"
        try:
            with torch.no_grad():
                stored = [replace(shape, source=None) for shape in self.paged_shapes]
                self._self_test.run(self.paged_shapes, self._paged_cache, far=stored == self.shapes)
        except UnsupportedError as error:
            return f"its attention cannot be replaced: {error}"
        return None

    def _ragged_cache(self, shapes: Sequence[LayerShape], rows: int, slots: int) -> DenseCache:
        cache = DenseCache(shapes, rows, self._contiguous)
        cache.reserve(slots)
        return cache

    def _paged_cache(self, shapes: Sequence[LayerShape], rows: int, slots: int) -> PagedCache:
        blocks = -(-slots // BLOCK_SIZE)
        table = torch.arange(1, 1 + rows * blocks, dtype=torch.int32, device=self.device).view(rows, blocks)
        return PagedCache(KVCachePool(shapes, 1 + rows * blocks), table)


def context_of(config: object) -> int | None:
    """The last position that plain decoding and a tree agree on, plus one."""
    whole, dynamic = getattr(config, "max_position_embeddings", None), dynamic_context(config)
    return min((each for each in (whole, dynamic) if each is not None), default=None)
