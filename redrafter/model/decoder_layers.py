"""Decoder layers with grouped weights that a kernel in C computes whole on a CPU, for few tokens on a dense cache.

A layer of SmolLM2 is forty operators, which take longer than its products for one token.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.attention.mask import additive_mask
from redrafter.cache.dense import DenseCache, cache_in
from redrafter.cache.kv_cache import LayerShape
from redrafter.kernels.cpu import decoder_layer
from redrafter.kernels.cpu.decoder_layer import Layer, Linear
from redrafter.model.linear_layers import is_unmodified_linear
from redrafter.model.patch import MODEL_ERRORS, ModelPatch
from redrafter.model.quantized_layers import GroupedLinear

LINEARS = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"  # the last two may miss
HOOKS = "_forward_hooks", "_forward_pre_hooks"
TRIED_LENGTH, TRIED_TOKENS = 21, 3


class FastLayers:
    """The decoder layers of a model that the kernel computes, by the addresses of their weights, which must not change.

    A layer is found by its parts, and used if the kernel computes what its module does. Where something watches the
    parts of layers by hooks, all layers are left to the model.

    Attributes:
        parts: The layers and all modules in them.
    """

    def __init__(self, model: nn.Module):
        """Find the layers, and try each of them."""
        inputs, self._layers, self._hooks = _Inputs(), list[_FastRun](), list[Mapping[int, object]]()
        for module in model.modules() if decoder_layer.find_kernel() else ():
            layer = _read_layer(module)
            if layer is None or (self._layers and not self._layers[0].is_like(layer)):
                continue
            fast, parts = _FastRun([module], [layer], inputs), [part for part in module.modules() if part is not module]
            with ModelPatch() as patch:
                for part, name in product(parts, HOOKS):
                    patch.put(vars(part), name, {})
                if not fast.is_right():
                    continue
            self._layers.append(fast)
            self._hooks += [vars(part)[name] for part, name in product(parts, HOOKS)]
        modules = self.modules
        self.parts = {part for module in modules for part in module.modules()}
        self._hooks_of_layers = [vars(module)[name] for module, name in product(modules, HOOKS)]
        # Where the model calls its layers one after the other, and nothing is between them, one call computes all.
        whole = _FastRun(modules, [layer for run in self._layers for layer in run.layers], inputs, calls_hooks=True)
        self._places = [place for parent in model.modules() for place in _places_of(whole, parent)] if modules else []

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that the kernel computes."""
        return [module for run in self._layers for module in run.modules]

    def add_to(self, patch: ModelPatch, *, alike: bool, recorded: Sequence[nn.Module]) -> bool:
        """Compute these layers by the kernel in a forward; calls without a dense cache are left to the model.

        Returns whether one call computes all of them.

        Args:
            patch: The changes of the forward.
            alike: Whether the model gives all layers the same mask.
            recorded: Modules that have one hook each, which reads their output.
        """
        if any(self._hooks):
            return False
        whole = alike and sum(map(len, self._hooks_of_layers)) == sum(each in recorded for each in self.modules)
        for parent, name, stand_in in self._places if whole else ():
            if len(parent._modules[name]) == len(self._layers):  # none is left out for a test
                patch.put(parent._modules, name, stand_in)
                return True
        for run in self._layers:
            patch.put(vars(run.modules[0]), "forward", run)
        return False


def _places_of(run: "_FastRun", parent: nn.Module) -> Iterator[tuple[Any, str, nn.Module]]:
    """Yield the lists of a module that hold the layers of a run, with lists that hold the run in their place."""
    for name, child in parent._modules.items():
        if isinstance(child, nn.ModuleList) and list(child) == run.modules:
            layer = copy(run.modules[0])  # of which a model may read attributes
            vars(layer).update({"forward": run} | {name: OrderedDict() for name in HOOKS})
            yield parent, name, nn.ModuleList([layer])


class _Inputs:
    """Inputs that the layers of a forward share, and the memory that they need in between."""

    def __init__(self) -> None:
        self.forward, self._buffer = decoder_layer.Forward(), torch.empty(0)
        self._of: tuple[object, ...] = None, None, None

    def set(self, x: Tensor, mask: Tensor | None, rope: Any, cache: DenseCache, layer: Layer) -> bool:
        """Set them, and return whether the kernel can compute with them."""
        rope_of, mask_of, written_of = self._of
        if rope is rope_of and mask is mask_of and cache.written is written_of:
            return True
        (rows, nodes, _), (cos, sin), window = x.shape, rope, cache.window
        float32 = [x, cos, sin, *cache.pools, *([] if mask is None else [mask])]
        if (
            any(part.dtype != torch.float32 or not part.is_cpu for part in float32)
            or x.requires_grad
            or rows * nodes > decoder_layer.MAX_TOKENS
            or window > decoder_layer.MAX_SLOTS
            or rows != cache.rows
            or cache.contiguous
            or not cos.shape[1:] == sin.shape[1:] == (nodes, layer.width)
            or not (cos.is_contiguous() and sin.is_contiguous())
            or (nodes > 1 if mask is None else mask.shape[1:] != (1, nodes, window) or mask.stride(3) != 1)
        ):
            return False
        if len(self._buffer) < rows * nodes * layer.memory:
            self._buffer = torch.empty(rows * nodes * layer.memory)
        self.forward = forward = decoder_layer.Forward()
        forward.cos, forward.sin, forward.mask = cos.data_ptr(), sin.data_ptr(), decoder_layer.address(mask)
        forward.buffer, forward.sums = self._buffer.data_ptr(), decoder_layer.address(cache.sums)
        forward.slots, forward.threads = cache.written[x.device].data_ptr(), torch.get_num_threads()
        forward.rows, forward.nodes, forward.window, forward.capacity = rows, nodes, window, cache.capacity
        forward.rope_row = 0 if len(cos) == 1 else nodes * layer.width
        if mask is not None:
            forward.mask_row, forward.mask_node = 0 if len(mask) == 1 else mask.stride(0), mask.stride(2)
        self._of = rope, mask, cache.written  # held, so that no others get their ids
        return True


class _FastRun:
    """The forward of one layer, or of successive ones."""

    def __init__(self, modules: list[Any], layers: list[Layer], inputs: _Inputs, *, calls_hooks: bool = False):
        self.modules, self.layers, self._inputs, self._kernel = modules, layers, inputs, decoder_layer.find_kernel()
        self._hooks = [module._forward_hooks if calls_hooks else {} for module in modules]  # of an output's readers
        self._slow = [module.forward for module in modules]
        self._indices = [getattr(module.self_attn, "layer_idx", 0) for module in modules]
        self._addresses = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layers, for inputs that the kernel cannot compute as the modules do."""
        given, cache = self._inputs, cache_in(kwargs)
        mask, rope = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
        if type(cache) is not DenseCache or args or rope is None or not given.set(x, mask, rope, cache, self.layers[0]):
            for layer, slow in enumerate(self._slow):
                x = slow(x, *args, **kwargs)
                self._call_hooks(layer, x)
            return x
        assert self._kernel is not None, "no layer is fast without a kernel"
        forward, stores = given.forward, [store.data_ptr() for i in self._indices for store in cache.stores(i)]
        pools, x = (ctypes.c_void_p * len(stores))(*stores), x.contiguous()
        out = torch.empty_like(x)
        outputs = [torch.empty_like(x) if hooks else out for hooks in self._hooks[:-1]] + [out]
        outs = (ctypes.c_void_p * len(outputs))(*(each.data_ptr() for each in outputs))
        forward.layers, forward.pools = ctypes.addressof(self._addresses), ctypes.addressof(pools)
        forward.depth, forward.x, forward.outs = len(self.layers), x.data_ptr(), ctypes.addressof(outs)
        self._kernel(ctypes.addressof(forward))
        for layer, output in enumerate(outputs):
            self._call_hooks(layer, output)
        return out

    def _call_hooks(self, layer: int, output: Tensor) -> None:
        for hook in list(self._hooks[layer].values()):
            hook(self.modules[layer], (), output)

    def is_like(self, layer: Layer) -> bool:
        """Return whether a layer has the sizes of these."""
        return (layer.width, layer.memory) == (self.layers[0].width, self.layers[0].memory)

    def is_right(self) -> bool:
        """Return whether the kernel computes what the module does, with one of the two offsets of norms."""
        try:
            expected = self._try(self._slow[0])
            for self.layers[0].offset in (0.0, 1.0):
                if all(map(_is_close, self._try(self), expected)):
                    return True
        except MODEL_ERRORS:  # it takes other arguments
            pass
        return False

    def _try(self, forward: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Return the output for random tokens of a tree after other tokens, and the keys and values in the cache."""
        layer, nodes, generator = self.layers[0], (1, TRIED_TOKENS), torch.Generator().manual_seed(0)
        shape = LayerShape(layer.heads, layer.width, layer.width, torch.float32, torch.device("cpu"))
        cache = DenseCache([shape.storing_nothing()] * self._indices[0] + [shape], 1)
        cache.reserve(TRIED_LENGTH + TRIED_TOKENS)
        cache.write_after(torch.tensor([TRIED_LENGTH]), TRIED_TOKENS, drafts=True)
        for pool in cache.pools:
            pool.normal_(generator=generator)
        x, cos, sin = (torch.randn(*nodes, n, generator=generator) for n in (layer.query.inner, *[layer.width] * 2))
        mask = additive_mask(torch.rand(*nodes, cache.window, generator=generator) < 0.5, torch.float32)
        positions = torch.arange(TRIED_TOKENS)[None] + TRIED_LENGTH
        with torch.no_grad():
            out = forward(
                x, attention_mask=mask, position_ids=positions, past_key_values=cache, position_embeddings=(cos, sin)
            )
        return out, *cache.stores(self._indices[0])


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def _read_layer(module: nn.Module) -> Layer | None:
    """Return a decoder layer of Llama's parts for the kernel; None for another module, or without grouped weights."""
    if not {"self_attn", "mlp"} <= module._modules.keys() or any("forward" in vars(part) for part in module.modules()):
        return None
    parts: dict[str, Any] = dict(module.named_modules())
    linears, norms = ([parts.get(name) for name in names] for names in (LINEARS, NORMS))
    if not any(type(linear) is GroupedLinear for linear in linears) or None in norms[:2]:
        return None
    weights = [weight for linear in linears if linear is not None and (weight := _read_linear(linear)) is not None]
    scales, attention = [getattr(norm, "weight", None) for norm in norms], parts["self_attn"]
    [epsilon, *others] = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms if norm}
    width = getattr(attention, "head_dim", 1)
    if len(weights) < len(linears) or others or not isinstance(epsilon, float) or width % decoder_layer.MULTIPLE:
        return None
    query, key, _, _, gate, *_ = weights
    size, heads, group = query.inner, key.features // width, query.features // key.features
    queries, keys, wide = heads * group * width, heads * width, gate.features
    shapes = (queries, size), (keys, size), (keys, size), (size, queries), (wide, size), (wide, size), (size, wide)
    if any((weight.features, weight.inner) != shape for weight, shape in zip(weights, shapes, strict=True)):
        return None
    for scale, count in zip(scales, (size, size, width, width), strict=True):
        if scale is not None and (scale.dtype != torch.float32 or scale.shape != (count,)):
            return None
    scaling = getattr(attention, "scaling", width**-0.5)
    return Layer(*weights, *map(decoder_layer.address, scales), heads, group, width, epsilon, 0.0, scaling)


def _read_linear(linear: Any) -> Linear | None:
    if type(linear) is GroupedLinear:
        return Linear.of_layer(linear.weight, linear.weight_scale, linear.weight_minimum, linear.bias)
    return Linear.of_layer(linear.weight, None, None, linear.bias) if is_unmodified_linear(linear) else None
