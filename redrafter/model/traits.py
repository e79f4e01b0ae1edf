"""Properties of a model's layers, probed by causal forwards and not taken from a list of models.

A config says little: some models ignore its `sliding_window`, some window without telling their attention function. So
the model runs once with an attention function and a mask function of ours. The mask function receives the rule by which
transformers builds the mask (`mask_function(batch, head, query, key) -> bool`) and evaluates it by position; the
attention function learns which mask each layer was given, and the shape of its keys and values.

What mixers call their states, and how many there are, differs between architectures too. So where a cache of the model
has any, a forward is watched: a mixer is the innermost module that was handed the cache and left tensors in it; its
states are those tensors. Then it is tried apart.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    cache_utils,
)

from redrafter.attention.mask import AttentionKind, LayerKinds
from redrafter.cache.dense import cache_argument
from redrafter.cache.kv_cache import LayerShape
from redrafter.cache.states import StateKey, StateShape
from redrafter.errors import UnsupportedError, first_line
from redrafter.model.linear_layers import linear_calls
from redrafter.model.patch import MODEL_ERRORS, ModelPatch
from redrafter.model.positions import find_slot_readers
from redrafter.model.recurrent_layers import Mixer, MixerTokens, copied_layer, layer_tensors, layer_without_tensors

PROBE_NAME = "redrafter_probe"
PROBED_POSITION = 1 << 20  # at which a mask rule is evaluated; a window or chunk that is longer counts as none

MaskRule = Callable[..., object]  # `rule(batch, head, query, key)` of transformers: whether the query sees the key

_Call: TypeAlias = tuple[Mixer, Mapping[str, Any], object]  # with its arguments by name, and its output

_RECURRENT: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())  # an older release has none


@dataclass
class AttentionProbe:
    """A model's attention as one forward shows it.

    Attributes:
        rules: The distinct kinds of attention that the model built masks for, in order.
        kinds: Per layer index, the kind of its mask; None for a mask that the layer changed or made by itself.
        shapes: Per layer index, the shape of the keys and values that its attention function received. A layer that is
            given the very tensors of an earlier one stores nothing and names that one as its source.
        changed: Indices of the layers that changed the mask that they were given.
        failure: Why the forward could not run with our attention function; None when it ran.
        given: Layers with the keys and values that they received, until the forward has ended.
    """

    rules: list[AttentionKind | None] = field(default_factory=list)
    kinds: dict[int, AttentionKind | None] = field(default_factory=dict)
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    failure: str | None = None
    given: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def record(self, layer: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        """Record the keys and values `[B, heads, T, dim]` and the mask that a layer's attention function received."""
        source = next((first for first, k, v in self.given if k is key and v is value), None)
        # The tensors themselves are kept: an id alone could belong to a later tensor at the same address.
        self.given.append((layer, key, value))
        if source is None:
            self.shapes[layer] = LayerShape(
                heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3], dtype=key.dtype, device=key.device
            )
        else:
            self.shapes[layer] = self.shapes[source].storing_nothing(source)
        numbers = set() if mask is None else set(mask.flatten().tolist())
        number = numbers.pop() if len(numbers) == 1 else 0
        known = number in range(1, 1 + len(self.rules))
        self.kinds[layer] = self.rules[int(number) - 1] if known else None
        if mask is not None and not known:
            self.changed.add(layer)

    def by_layer(self, count: int) -> tuple[AttentionKind, ...] | None:
        """Return the kind of each of `count` layers, or None unless all are known.

        A layer that attends to nothing of the text counts as the first that does.
        """
        default = next(iter(self.kinds.values()), None)
        if not self.kinds and len(self.rules) == 1:  # attention code of the model's own, under one mask for all layers
            default = self.rules[0]
        kinds = [self.kinds.get(layer, default) for layer in range(count)]
        known = tuple(kind for kind in kinds if kind is not None)
        return known if len(known) == count else None


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model's layers.

    Attributes:
        config: The config that they read.
        attention: The attention that they showed.
        mixers: The modules that keep recurrent states.
        slot_readers: The attention modules that take positions from the cache; see `answer_by_position`.
    """

    config: Any
    attention: AttentionProbe
    mixers: Sequence[Mixer]
    slot_readers: Sequence[Any]

    @cached_property
    def kinds(self) -> LayerKinds:
        """The kind of attention of each layer; `UnsupportedError` where the config does not assign different kinds."""
        probe = self.attention
        if probe.failure is None and not probe.kinds and not probe.rules:
            return LayerKinds(None, {})  # no layer attends
        by_layer = probe.by_layer(self.config.num_hidden_layers)
        return LayerKinds(by_layer, _by_name(by_layer, self.config))


def learn_traits(model: PreTrainedModel, config: PretrainedConfig, ids: Tensor, name: str) -> ModelTraits:
    """Run a model on any text of four tokens at least, and return the properties of its layers.

    Args:
        model: A causal LM of transformers; left as it was.
        config: The config that its decoder layers read.
        ids: The text, `[T]` int64.
        name: Name of the model in messages.

    Raises:
        UnsupportedError: A module keeps states in a way that is not known, or continues from them wrongly.
    """
    mixers, probe = find_mixers(model, config, ids, name), AttentionProbe()
    running = _RUNNING.set(probe)
    try:
        with ModelPatch() as patch:
            patch.set(config, "_attn_implementation", PROBE_NAME)
            model(input_ids=ids[None], use_cache=False)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError) as error:
        probe.failure = first_line(error)
    finally:
        _RUNNING.reset(running)
        probe.given.clear()
    return ModelTraits(config, probe, mixers, find_slot_readers(model))


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
    """Return a mask `[B, 1, Q, S]` that holds nothing but the number of its kind, so that its copies hold it too."""
    rules, device = _RUNNING.get().rules, kwargs.get("device")
    kind = _kind_of(mask_function, device)
    if kind not in rules:
        rules.append(kind)
    shape = (batch_size, 1, int(q_length), kv_length)
    return torch.full(shape, float(1 + rules.index(kind)), dtype=dtype, device=device)


def _probe_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: object
) -> tuple[Tensor, None]:
    """Attend to nothing: record what would have been attended to, and return zeros `[B, T, heads, dim]`."""
    _RUNNING.get().record(module.layer_idx, key, value, attention_mask)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)


def _kind_of(rule: MaskRule, device: torch.device | None) -> AttentionKind | None:
    """Return the kind that a mask rule of transformers describes, or None for one that is no window and no chunk.

    The rule may hold tensors on the device.
    """
    first = _first_seen(rule, PROBED_POSITION, device)
    second = _first_seen(rule, PROBED_POSITION + 1, device)
    if first is None or second is None:
        return None
    if first == 0:
        return AttentionKind()
    # From one position to the next a window moves by one, and a chunk begins where it did, or at the new position.
    if second == first + 1:
        return AttentionKind(window=PROBED_POSITION - first + 1)
    if second == PROBED_POSITION + 1:
        return AttentionKind(chunk=PROBED_POSITION - first)
    before = _first_seen(rule, first - 1, device)  # of the chunk that ends before the one of the probed position
    return None if before is None else AttentionKind(chunk=first - before)


def _first_seen(rule: MaskRule, position: int, device: Any) -> int | None:
    """Return the first position that `position` sees; None unless it sees all from there to itself and no other."""
    batch = torch.zeros((), dtype=torch.long, device=device)
    query = torch.tensor(position, device=device)
    seen = torch.as_tensor(rule(batch, batch, query, torch.arange(position + 2, device=device)))
    seen = seen.expand(position + 2)
    first = int(seen.int().argmax())
    contiguous = bool(seen[first : position + 1].all()) and not bool(seen[position + 1])
    return first if contiguous else None


_MASK_NAMES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # of layers that attend and mix


def _by_name(by_layer: tuple[AttentionKind, ...] | None, config: object) -> dict[str, AttentionKind]:
    """Return the kinds of the layers by the names of masks; see `LayerKinds`."""
    if by_layer is None:
        # The kind of each named kind of layer, by the rule that transformers uses to choose its caches.
        window = getattr(config, "sliding_window", None)
        chunk = getattr(config, "attention_chunk_size", None)
        of_config = {
            "full_attention": AttentionKind(),
            "sliding_attention": AttentionKind(window=window),
            "chunked_attention": AttentionKind(chunk=chunk),
        }
        kind = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
        types = set(getattr(config, "layer_types", None) or [kind])
        if unknown := sorted(types - of_config.keys()):
            message = f"layers of type {', '.join(unknown)} are not known; known are {', '.join(of_config)}"
            raise UnsupportedError(message)
        return {name: of_config[name] for name in sorted(types)}
    if len(set(by_layer)) == 1:
        return {"all": by_layer[0]}
    names = getattr(config, "layer_types", None) or ()
    by_name = dict(zip(names, by_layer, strict=False))
    if tuple(by_name.get(name) for name in names) != by_layer:
        raise UnsupportedError("its layers have different masks, and config.layer_types does not assign them to layers")
    for name, mask_name in _MASK_NAMES.items():
        if name in by_name:
            by_name.setdefault(mask_name, by_name[name])
    return dict(sorted(by_name.items()))


def find_mixers(model: PreTrainedModel, config: PretrainedConfig, ids: Tensor, name: str) -> list[Mixer]:
    """Return the modules of a model that keep recurrent states; arguments and errors are those of `learn_traits`."""
    argument = cache_argument(model.forward)
    cache = DynamicCache(config=config)
    if argument is None or not any(isinstance(layer, _RECURRENT) for layer in cache.layers):
        return []
    empty = [copied_layer(layer) for layer in cache.layers]
    known = set[StateKey]()
    calls = list[_Call]()

    def after_call(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """Take note of a module that has left new tensors in the cache. Modules inside it were called before."""
        parameters = tuple(inspect.signature(module.forward).parameters)
        given = dict(zip(parameters, args, strict=False)) | kwargs
        handed = [name for name, value in given.items() if value is cache]
        left = [
            StateShape(layer=index, name=name, shape=tuple(x.shape[1:]), dtype=x.dtype, device=x.device)
            for index, layer in enumerate(cache.layers if handed else ())
            if isinstance(layer, _RECURRENT)
            for name, x in layer_tensors(layer).items()
            if (index, name) not in known
        ]
        if not left:
            return
        known.update(state.key for state in left)
        layer = left[0].layer
        vectors = [name for name, x in given.items() if isinstance(x, Tensor) and x.shape[1:-1] == (len(ids),)]
        if any(state.layer != layer for state in left) or not vectors:
            raise UnsupportedError(f"its {type(module).__name__} keeps unknown states, which cannot be rolled back")
        mixer = Mixer(
            module=module,
            layer=layer,
            states=tuple(left),
            parameters=parameters,
            arguments=frozenset(given),
            cache_argument=handed[0],
            tokens_argument=vectors[0],
            empty=empty[layer],
            full=empty[layer],
        )
        calls.append((mixer, given, output))

    with ModelPatch() as patch:
        for module in model.modules():
            patch.hook(module, after_call, with_kwargs=True)
        model(input_ids=ids[None], use_cache=True, **{argument: cache})
    return [_tried(*call, cache, len(ids), name) for call in calls]


def _tried(mixer: Mixer, given: Mapping[str, Any], returned: object, cache: Cache, count: int, name: str) -> Mixer:
    """Return a mixer that was tried apart from the model: half of the tokens at once, then the others both ways.

    In a causal forward of one row of `count` tokens, with that cache, it was `given` these arguments. Raises
    `UnsupportedError` where it continues from its states wrongly, one token at a time.
    """
    mixer = replace(mixer, full=layer_without_tensors(cache.layers[mixer.layer]))
    half = count // 2
    forward = mixer.module.forward
    row = MixerTokens(given[mixer.tokens_argument])
    index = torch.arange(count, device=row.device)
    expected = row.take_run({"": returned}, index[half:])[""]
    begun = row.take_run(given, index[:half])
    with linear_calls(mixer.module) as linears:
        output, states = mixer.run_forward(forward, begun, None)
    # Linear layers that read the mixer's tokens as they are, and the one whose output it returns. One that is called
    # twice is none of them, nor is one that is both.
    names = [name for name, _, _ in linears]
    tokens = begun[mixer.tokens_argument]
    once = [(layer, x, y) for layer, x, y in linears if names.count(layer) == 1 and y is not x]
    first = tuple(layer for layer, x, y in once if x is tokens and y is not output)
    last = next((layer for layer, x, y in once if y is output and x is not tokens), None)
    # Cloned, as a mixer may update its states in place and both ways start from the same.
    later, parts = [state.clone() for state in states], []
    for token in index[half:, None]:
        part, states = mixer.run_forward(forward, row.take_run(given, token), states)
        parts.append(part)
    one_by_one = pytree.tree_map(lambda *x: torch.cat(x, dim=1) if isinstance(x[0], Tensor) else x[0], *parts)
    if not _close(one_by_one, expected, _ONE_BY_ONE):
        raise UnsupportedError(
            f"layer {mixer.layer} of {name} ({type(mixer.module).__name__}) continues from its state with other "
            "numbers than it reads a whole text with; this architecture cannot be verified exactly"
        )
    at_once, _ = mixer.run_forward(forward, row.take_run(given, index[half:]), later)
    return replace(
        mixer,
        continues=_close(at_once, expected, _AT_ONCE),
        first_linears=first,
        last_linear=last,
        tokens_alone=_takes_tokens_alone(mixer, tokens, output),
    )


def _takes_tokens_alone(mixer: Mixer, tokens: Tensor, returned: object) -> bool:
    """Return whether a mixer returns for `tokens` `[1, T, D]` alone what it `returned` with all of its arguments."""
    if not isinstance(returned, Tensor) or (returned.shape, returned.dtype) != (tokens.shape, tokens.dtype):
        return False
    try:
        found, _ = mixer.run_forward(
            mixer.module.forward, dict.fromkeys(mixer.arguments) | {mixer.tokens_argument: tokens}, None
        )
    except MODEL_ERRORS:
        return False
    return torch.equal(found, returned)


# What may differ, of the largest number of an output. Where a module clamps in one way of reading and not in the other,
# as some of transformers do, it is a hundredth; a state that is wrong makes it near to 1.
_ONE_BY_ONE, _AT_ONCE = 0.1, 2e-3
_HALF_ROUNDING = 0.1


def _close(found: object, expected: object, part: float) -> bool:
    """Return whether two outputs differ by no more than a part of the largest number, or by half-precision rounding."""
    leaves = zip(*(pytree.tree_leaves(x) for x in (found, expected)), strict=True)
    return all(
        float((a.float() - b.float()).abs().max())
        <= (part if a.dtype == torch.float32 else _HALF_ROUNDING) * float(b.abs().max())
        for a, b in leaves
        if isinstance(a, Tensor)
    )
