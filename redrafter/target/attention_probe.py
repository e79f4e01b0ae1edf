"""Learn from one plain forward what each layer of a model attends to.

A config says little: some models ignore its `sliding_window`, some window without telling their attention function. So
the model runs once with an attention function and a mask function of ours. The mask function receives the rule by which
transformers builds the mask (`mask_function(batch, head, query, key) -> bool`) and evaluates it by position; the
attention function learns which mask each layer was given, and the shape of its keys and values.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from redrafter.attention.mask import AttentionKind, LayerKinds
from redrafter.cache.dense import LayerShape
from redrafter.errors import UnsupportedError, first_line
from redrafter.target.patch import ModelPatch

__all__ = ["AttentionProbe", "probe_attention"]

PROBE_NAME = "redrafter_probe"
PROBED_POSITION = 1 << 20  # at which a mask rule is evaluated; a window or chunk that is longer counts as none

MaskRule = Callable[..., Any]  # `rule(batch, head, query, key)` of transformers: whether the query sees the key


@dataclass
class AttentionProbe:
    """What one forward shows of a model's layers.

    Attributes:
        rules: The distinct kinds of attention that the model built masks for, in order.
        shapes: Per layer index, what it must store for its attention function to receive what it did. A layer that is
            given the very tensors of an earlier one stores nothing and names that one as its source.
        kinds: Per layer index, the kind of its mask; None for a mask that the layer changed or made by itself.
        changed: Indices of the layers that changed the mask that they were given.
        failure: Why the forward could not run with our attention function; None when it ran.
    """

    rules: list[AttentionKind | None] = field(default_factory=list)
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    kinds: dict[int, AttentionKind | None] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    failure: str | None = None
    _given: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # held, so that no tensor's id is used twice

    def mask(self, rule: MaskRule, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Return a mask that holds nothing but the number of its kind, so that copies of it tell the kind too.

        Args:
            rule: The rule by which transformers builds the mask.
            shape: Shape of the mask.
            dtype: Dtype of the mask.
            device: Device of the mask.
        """
        kind = _kind_of(rule, device)
        if kind not in self.rules:
            self.rules.append(kind)
        return torch.full(shape, float(1 + self.rules.index(kind)), dtype=dtype, device=device)

    def record(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Record what a layer's attention function received.

        Args:
            layer: Index of the layer.
            key: Keys, `[B, heads, T, dim]`.
            value: Values, `[B, heads, T, dim]`.
            mask: The mask, `[B, 1, T, T]`; None where it was given none.
        """
        source = next((first for first, k, v in self._given if k is key and v is value), None)
        self._given.append((layer, key, value))
        if source is None:
            self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        else:
            self.shapes[layer] = self.shapes[source].storing_nothing(source)
        numbers = set() if mask is None else set(mask.flatten().tolist())
        number = numbers.pop() if len(numbers) == 1 else 0
        known = number in range(1, 1 + len(self.rules))
        self.kinds[layer] = self.rules[int(number) - 1] if known else None
        if mask is not None and not known:
            self.changed.add(layer)

    def release_tensors(self) -> None:
        """Let go of the keys and values that were received; call it once the forward has ended."""
        self._given.clear()

    def layer_kinds(self, config: Any) -> LayerKinds:
        """Return what each layer of the model with this decoder config attends to."""
        if self.failure is None and not self.kinds and not self.rules:
            return LayerKinds(None, {})  # no layer attends
        by_layer = self._by_layer(config.num_hidden_layers)
        return LayerKinds(by_layer, _by_name(by_layer, config))

    def _by_layer(self, count: int) -> tuple[AttentionKind, ...] | None:
        """Return the kind of each of `count` layers, or None unless all are known.

        A layer that attends to nothing of the text counts as the first that does.
        """
        default = next(iter(self.kinds.values()), None)
        if not self.kinds and len(self.rules) == 1:  # attention code of the model's own, under one mask for all layers
            default = self.rules[0]
        kinds = [self.kinds.get(layer, default) for layer in range(count)]
        known = tuple(kind for kind in kinds if kind is not None)
        return known if len(known) == count else None


def probe_attention(model: Any, config: Any, ids: Tensor) -> AttentionProbe:
    """Run one plain forward that attends to nothing, and return what its layers asked for.

    Args:
        model: A causal LM of transformers.
        config: The config that its decoder layers read; left as it was.
        ids: Any text of at least two tokens, `[T]` int64.
    """
    probe = AttentionProbe()
    running = _RUNNING.set(probe)
    try:
        with ModelPatch() as patch:
            patch.set(config, "_attn_implementation", PROBE_NAME)
            model(input_ids=ids[None], use_cache=False)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        probe.failure = first_line(error)
    finally:
        _RUNNING.reset(running)
        probe.release_tensors()
    return probe


# The functions below are registered by name for the whole process; which probe they serve depends on who calls.
_RUNNING: ContextVar[AttentionProbe] = ContextVar("running probe")


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor:
    """Stand for a mask `[B, 1, Q, S]` of transformers and record its rule."""
    shape = (batch_size, 1, int(q_length), kv_length)
    return _RUNNING.get().mask(mask_function, shape, dtype, kwargs.get("device"))


def _probe_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attend to nothing: record what would have been attended to, and return zeros `[B, T, heads, dim]`."""
    _RUNNING.get().record(module.layer_idx, key, value, attention_mask)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def _kind_of(rule: MaskRule, device: Any) -> AttentionKind | None:
    """Return the kind that a mask rule of transformers describes, or None for one that is no window and no chunk.

    Args:
        rule: The rule.
        device: Device of the mask, on which a rule may hold tensors.
    """
    first, second = _first_seen(rule, PROBED_POSITION, device), _first_seen(rule, PROBED_POSITION + 1, device)
    if first is None or second is None:
        return None
    if first == 0:
        return AttentionKind()
    if second == first + 1:
        return AttentionKind(window=PROBED_POSITION - first + 1)
    chunk = PROBED_POSITION - first if second == PROBED_POSITION + 1 else _chunk_length(rule, first, device)
    return None if chunk is None else AttentionKind(chunk=chunk)


def _first_seen(rule: MaskRule, position: int, device: Any) -> int | None:
    """Return the first position that `position` sees; None unless it sees all from there to itself and no other."""
    batch, query = torch.zeros((), dtype=torch.long, device=device), torch.tensor(position, device=device)
    seen = torch.as_tensor(rule(batch, batch, query, torch.arange(position + 2, device=device)))
    seen = seen.expand(position + 2)
    first = int(seen.int().argmax())
    contiguous = bool(seen[first : position + 1].all()) and not bool(seen[position + 1])
    return first if contiguous else None


def _chunk_length(rule: MaskRule, start: int, device: Any) -> int | None:
    """Return the length of the chunk that ends before position `start`, or None where no chunk does."""
    first = _first_seen(rule, start - 1, device)
    return None if first is None else start - first


def _by_name(by_layer: tuple[AttentionKind, ...] | None, config: object) -> dict[str, AttentionKind]:
    """Return the kinds of the layers by the names of masks; see `LayerKinds`."""
    if by_layer is None:
        return _kinds_of_config(config)
    if len(set(by_layer)) == 1:
        return {"all": by_layer[0]}
    names = getattr(config, "layer_types", None) or ()
    by_name = dict(zip(names, by_layer, strict=False))
    if tuple(by_name.get(name) for name in names) != by_layer:
        raise UnsupportedError("its layers differ in what they see, and config.layer_types does not tell them apart")
    for name, mask_name in _MASK_NAMES.items():
        if name in by_name:
            by_name.setdefault(mask_name, by_name[name])
    return dict(sorted(by_name.items()))


_MASK_NAMES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # of layers that attend and mix


def _kinds_of_config(config: object) -> dict[str, AttentionKind]:
    """Return the kind of each named kind of layer, by the rule that transformers uses to choose its caches."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    by_name = {
        "full_attention": AttentionKind(),
        "sliding_attention": AttentionKind(window=window),
        "chunked_attention": AttentionKind(chunk=chunk),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
    unknown = sorted(set(types) - by_name.keys())
    if unknown:
        raise UnsupportedError(f"layers of type {', '.join(unknown)} are not known; known are {', '.join(by_name)}")
    return {name: by_name[name] for name in sorted(set(types))}
