"""Batch-invariant targets: which models can be, and the check that they are."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from redrafter.cache.dense import LayerShape, states_of
from redrafter.cache.paged import KVCachePool, PagedCache
from redrafter.errors import UnsupportedError
from redrafter.kernels.block_size import BLOCK_SIZE
from redrafter.parallel.ranks import Ranks
from redrafter.target.cache_support import Support
from redrafter.target.drafter_inputs import decoder_stack
from redrafter.target.forward_batch import ForwardBatch, ForwardOutput
from redrafter.target.invariant_products import record_products
from redrafter.target.patch import ModelPatch
from redrafter.target.quantization import float8_scheme, is_quantized
from redrafter.target.varlen_forward import VarlenForward
from redrafter.tree.token_tree import chain

__all__ = ["check_products", "check_rows", "support_of"]

TOKENS = 26  # of the text that is read in several ways
WAYS = ([26], [1] * 26, [7, 7, 7, 5], [19, 7])  # how many of its tokens are in each forward


class InvariantTarget(Protocol):
    """The attributes of a target that are used here."""

    name: str
    model: Any
    config: Any
    device: torch.device
    vocab_size: int
    context: int | None
    ranks: Ranks
    varlen_forward: VarlenForward

    @property
    def paged(self) -> Support:
        """Whether the model can be decoded on a paged cache."""

    @property
    def paged_shapes(self) -> list[LayerShape]:
        """What each layer stores on a paged cache."""

    @property
    def fixed_rope_context(self) -> int | None:
        """Tokens of a text up to which its rope frequencies never change."""

    def verify(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a tree through the model; see `Target.verify`."""


def support_of(target: InvariantTarget) -> Support:
    """Return whether a model may be batch-invariant, as far as can be told without a forward in that mode."""
    if target.ranks.size > 1:
        return Support("it is split by tensor parallelism, and sums of ranks have an order of their own")
    if is_quantized(target.model.config):
        return Support("it is quantised, and its products are the quantiser's own; load it in bfloat16")
    if scheme := float8_scheme(target.model):
        return Support(
            "its weights are FP8, whose products sum in an order that suits the number of tokens; leave out "
            f"quantization={scheme!r} (--quantization {scheme})"
        )
    for name, module in target.model.named_modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            return Support(f"the weight of {name} is a {type(module.weight).__name__}; load it unquantised")
    if target.varlen_forward.attends_in_chunks:
        return Support("its layers attend within chunks, and the attention of one fixed order knows no chunks")
    if states_of(target.paged_shapes):
        return Support("its layers keep recurrent states, whose recurrences sum in an order of their own")
    return target.paged


def check_products(target: InvariantTarget) -> None:
    """Raise `UnsupportedError` if a forward multiplies matrices by other operators than our own, naming where."""
    with torch.inference_mode(), record_products(target.model) as products:
        _read(target, [7], _small_pool(target))
    if products:
        module, operator = products[0]
        raise UnsupportedError(
            f"{target.name} cannot be batch-invariant: {module or 'its forward'} calls {operator}, which sums in an "
            "order that suits the number of tokens"
        )


def check_rows(target: InvariantTarget, pool: KVCachePool | None = None) -> None:
    """Raise `UnsupportedError` if a text's logits depend on how many of its tokens share a forward.

    Args:
        target: The target, which computes row by row.
        pool: Where keys and values go, in blocks that hold nothing; None for memory of their own.
    """
    pool = _small_pool(target) if pool is None else pool
    with torch.inference_mode():
        expected = _read(target, WAYS[0], pool)
        if any(not torch.equal(_read(target, way, pool), expected) for way in WAYS[1:]):
            where = _first_difference(target, pool)
            raise UnsupportedError(
                f"{target.name} cannot be batch-invariant: {where} depends on how many tokens share a forward"
            )


def _small_pool(target: InvariantTarget) -> KVCachePool:
    return KVCachePool(target.paged_shapes, 2 + -(-TOKENS // BLOCK_SIZE))


def _read(target: InvariantTarget, sizes: Sequence[int], pool: KVCachePool) -> Tensor:
    """Return the logits of a text, `[T, V]`, that is read in forwards of these numbers of tokens."""
    blocks = min(pool.num_blocks - 1, 1 + -(-TOKENS // BLOCK_SIZE))
    bounds = [x for x in (target.context, target.fixed_rope_context, blocks * BLOCK_SIZE) if x is not None]
    count = min([sum(sizes), *bounds])
    ids = (torch.arange(count, device=target.device) * 7919 + 11) % target.vocab_size
    table = torch.arange(1, 1 + blocks, dtype=torch.int32, device=target.device)[None]
    cache = PagedCache(pool, table)
    logits, first = [], 0
    for size in sizes:
        if piece := ids[first : first + size].tolist():
            length = torch.full((1,), first, device=target.device)
            tokens = torch.tensor([piece], device=target.device)
            logits.append(target.verify(ForwardBatch(chain(tokens), length, cache)).logits[0])
        first += size
    return torch.cat(logits)


def _first_difference(target: InvariantTarget, pool: KVCachePool) -> str:
    """Name the first layer whose output depends on the number of tokens in the forward."""
    stack = decoder_stack(target.model, target.config.num_hidden_layers)
    outputs: list[Tensor] = []
    target.varlen_forward.compile(False)
    for way in WAYS:
        seen: list[Tensor] = []
        with ModelPatch() as patch:
            patch.watch(stack or (), seen.append)
            _read(target, way, pool)
        layers = len(stack or ())
        by_layer = [
            torch.cat([x[0, :size] for x, size in zip(seen[i::layers], way, strict=False)]) for i in range(layers)
        ]
        for layer, (x, y) in enumerate(zip(by_layer, outputs or by_layer, strict=True)):
            if not torch.equal(x, y):
                return f"the output of layer {layer}"
        outputs = outputs or by_layer
    return "its head"
