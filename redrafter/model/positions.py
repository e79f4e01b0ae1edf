"""Positions where a model's own code does not take them from its argument: slots of the cache, and sequence lengths.

Some architectures of transformers take a token's position from its slot: GPT-Neo masks by slot, Llama-4 scales queries
by the length of the cache, and ALiBi (Press et al. 2022) adds to each score a number that falls with the distance of
the key's slot. In a tree, slots and positions differ, and rows of a batch differ in length. So those attention modules
are patched to use positions.

transformers computes the biases of ALiBi from a padding mask `[B, S]`, which cannot express a tree. So the model
receives such a mask, without padding, and the inputs of its attention modules are replaced: the bias of a slot by the
bias of its position, and the mask by the tree's.

The RoPE frequencies of the kinds `longrope` and `dynamic` depend on the length of a sequence. transformers decides by
the longest position of a forward, for all rows of a batch, and keys stay in the cache as they were rotated. So where a
row is decoded alone, the token at position p after a prompt of P tokens is rotated by the frequencies for a length of
max(P, p + 1) tokens. Here each token gets the frequencies of its own row, whatever else is in its forward: a row's
output does not depend on its batch, and equals transformers' output for the row alone.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from redrafter.attention.mask import AttentionKind, TreeSlots, additive_mask
from redrafter.cache.dense import CACHE_NAME, DenseCache, cache_argument, cache_in
from redrafter.model.patch import MODEL_ERRORS, ModelPatch, Running, find_places, in_other_thread
from redrafter.tree.token_tree import Tree

Arguments: TypeAlias = Mapping[str, Any]
Positions: TypeAlias = Callable[[], Tensor]
"""Returns the positions of new nodes, `[B, M]` int64, which change from call to call of a compiled forward."""


def find_slot_readers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model that take positions from the cache."""
    return [module for module in model.modules() if type(module).__name__ in _PATCHES or has_alibi(module)]


def masks_slots(modules: Sequence[nn.Module]) -> bool:
    """Return whether any of these slot readers masks slots, or biases them, so that no attention can take its place."""
    return any(_PATCHES.get(type(module).__name__) is not _scale_by_position for module in modules)


def has_alibi(module: nn.Module) -> bool:
    """Return whether a module is an ALiBi attention whose biases can be replaced."""
    name, config = type(module).__name__, getattr(module, "config", None)
    return name in _BIASES and (name != "FalconAttention" or bool(getattr(config, "alibi", False)))


def answer_by_position(
    patch: ModelPatch, modules: Sequence[Any], positions: Positions, slots: TreeSlots | None = None
) -> None:
    """Pass true positions to attention modules that take positions from the cache.

    Args:
        patch: The patch of the forward.
        modules: The modules that `find_slot_readers` found.
        positions: Returns the positions of the new nodes.
        slots: The slots that the forward reads; None if attention is ours and needs no mask.
    """
    for module in modules:
        (_bias_by_position if has_alibi(module) else _PATCHES[type(module).__name__])(patch, module, positions, slots)


class _Whole:
    """A stand-in for a table over all slots that returns the same part of it for any index, but in other threads."""

    def __init__(self, table: Tensor, part: Tensor):
        self.shape, self.size, self._table, self._part = table.shape, table.size, table, part
        self._thread = threading.get_ident()

    def __getitem__(self, index: Any) -> Tensor:
        return self._table[index] if in_other_thread(self._thread) else self._part


class _OfOthers:
    """A stand-in for a flag that is False in the thread that makes it, and has its own value in other threads."""

    def __init__(self, flag: bool):
        self._flag, self._thread = flag, threading.get_ident()

    def __bool__(self) -> bool:
        return self._flag and in_other_thread(self._thread)


def _mask_by_position(patch: ModelPatch, module: Any, positions: Positions, slots: TreeSlots | None) -> None:
    """Mask a GPT-Neo layer by position; a local one looks back `window_size` positions."""
    assert slots is not None, "GPT-Neo's attention cannot be replaced"
    window = module.config.window_size if module.attention_type == "local" else None
    mask = module._buffers["bias"]  # [1, 1, context, context]
    seen = slots.seen(AttentionKind(window=window))[:, None].to(mask.device)
    patch.put(module._buffers, "bias", _Whole(mask, seen))


def _scale_by_position(patch: ModelPatch, module: Any, positions: Positions, slots: TreeSlots | None) -> None:
    """Make a Llama-4 layer scale its queries by the true position of each token.

    Llama-4 scales the queries of layers without RoPE by a factor that grows with the position (temperature tuning,
    arXiv 2501.19399), and counts positions by the length of the cache, which is wrong in a tree. So the layer's own
    scaling is disabled, and a hook on its query projection scales instead. Layers with RoPE, and models without the
    tuning, are unchanged.
    """
    if module.use_rope or not module.attn_temperature_tuning:
        return

    def scale(_: nn.Module, __: object, queries: Tensor) -> Tensor:
        steps = torch.floor((positions().to(queries.device).float() + 1) / module.floor_scale)  # [B, M]
        scales = torch.log1p(steps) * module.attn_scale + 1
        return (queries * scales[..., None]).to(queries.dtype)

    patch.put(vars(module), "attn_temperature_tuning", _OfOthers(True))
    patch.hook(module.q_proj, scale)


def _bias_by_position(patch: ModelPatch, module: nn.Module, positions: Positions, slots: TreeSlots | None) -> None:
    """Let an attention module with ALiBi, of a model that is given a mask of ones, add the bias of each position."""
    assert slots is not None, "attention with ALiBi cannot be replaced"
    biases = _BIASES[type(module).__name__]

    def hook(attention: nn.Module, args: tuple[Any, ...], given: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**given, **biases(attention, given, slots)}

    patch.hook(module, hook, before=True, with_kwargs=True)


def _of_positions(alibi: Tensor, slots: TreeSlots) -> Tensor:
    """Return biases by position, from biases by slot, which are for a row's positions 0 to S - 1.

    Args:
        alibi: Biases, `[B * H, 1, S]` or `[B, H, 1, S]`, which is the result's shape too.
        slots: The slots.
    """
    by_row = alibi.view(len(slots.length), -1, 1, slots.count)  # [B, H, 1, S]
    index = slots.positions.clamp(max=slots.count - 1).to(alibi.device)
    return by_row.gather(-1, index[:, None, None].expand_as(by_row)).view_as(alibi)


def _bloom(_: nn.Module, given: Arguments, slots: TreeSlots) -> Arguments:
    alibi = given["alibi"]
    mask = additive_mask(slots.seen(AttentionKind()).to(alibi.device), alibi.dtype)
    return {"alibi": _of_positions(alibi, slots), "attention_mask": mask}


def _falcon(module: Any, given: Arguments, slots: TreeSlots) -> Arguments:
    alibi = _of_positions(given["alibi"], slots)
    scaled = alibi.view(len(slots.length), -1, 1, slots.count) / math.sqrt(module.head_dim)  # [B, H, 1, S]
    unseen = ~slots.seen(AttentionKind()).to(alibi.device)[:, None]
    # Falcon's mask includes the biases.
    return {"alibi": alibi, "attention_mask": scaled.masked_fill(unseen, torch.finfo(alibi.dtype).min)}


def _mpt(_: nn.Module, given: Arguments, slots: TreeSlots) -> Arguments:
    table = given["position_bias"]  # [H, 1, context], 0 for the last position
    context = table.shape[-1]
    # The table is aligned at its last position, from which distances are counted.
    index = (slots.positions + max(context - slots.count, 0)).clamp(max=context - 1).to(table.device)
    bias = table[:, 0, index].transpose(0, 1)[:, :, None]  # [B, H, 1, S]
    return {
        "position_bias": _Whole(table, bias),
        "attention_mask": ~slots.seen(AttentionKind()).to(table.device)[:, None],
    }


_PATCHES: dict[str, Callable[[ModelPatch, nn.Module, Positions, TreeSlots | None], None]] = {
    "GPTNeoSelfAttention": _mask_by_position,
    "Llama4TextAttention": _scale_by_position,
}
_BIASES: dict[str, Callable[[nn.Module, Arguments, TreeSlots], Arguments]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}


class RopeByLength(ABC):
    """RoPE of a model whose frequencies depend on the sequence length.

    Attributes:
        switch_at: Length up to which a sequence has the frequencies of short ones.
        rereads: Whether the model's `generate` recomputes a sequence with the frequencies of long ones once it exceeds
            `switch_at` tokens. Other models keep the cache.
    """

    switch_at: int
    rereads: bool

    def drop_past_switch(self, tree: Tree, length: Tensor) -> Tree:
        """Return the tree without the tokens past the switch, in rows that are recomputed there.

        Those tokens cannot be accepted; the row, of `length` `[B]` committed tokens, continues from there in the next
        step.
        """
        if not self.rereads:
            return tree
        past = length[:, None] + tree.depth >= self.switch_at  # [B, N]
        return replace(tree, tokens=tree.tokens.masked_fill(past & (length < self.switch_at)[:, None], -1))

    def prompt_length(self, prompt: int, read: int) -> int:
        """Return the minimum length whose frequencies a prompt's tokens have.

        A preempted row has `read` more tokens than its prompt.
        """
        return max(prompt, read) if self.rereads else prompt

    def keeps_keys(self, prompt: int, longest: int) -> bool:
        """Return whether the keys of a prompt stay valid while the sequence grows to `longest` tokens."""
        return not self.rereads or prompt > self.switch_at or longest <= self.switch_at

    @abstractmethod
    def prefix_key(self, prompt: int) -> Hashable:
        """Return a key that is equal for prompts whose equal tokens have equal keys. prompt: its number of tokens."""

    @abstractmethod
    def add_to(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token of a forward the frequencies of its own row.

        Args:
            patch: The patch of the forward.
            at_least: Returns the minimum length whose frequencies each token has, int64 in a shape that broadcasts to
                that of the positions; a token with a later position has the frequencies of its position.
        """


def find_switching_rope(model: Any, config: PretrainedConfig, cache: DenseCache) -> "RopeByLength | None":
    """Return the rope of a model where it switches, and the behaviour of the model's own `generate` there; else None.

    The cache must be an empty one for one row.
    """
    whole = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    entries = (rope, *(entry for entry in rope.values() if isinstance(entry, dict)))  # of all kinds of layers
    entry = next((entry for entry in entries if entry.get("rope_type") == "longrope"), {})
    field = "original_max_position_embeddings"
    switch_at = entry.get(field) or getattr(config, field, None) or whole
    if not entry or switch_at is None or (whole is not None and whole <= switch_at):
        return None
    # The model's own preparation shows it: it returns no cache if it recomputes the sequence.
    cache.committed = switch_at
    ids = torch.zeros(1, switch_at + 1, dtype=torch.long, device=model.device)
    prepare = model.prepare_inputs_for_generation
    prepared = prepare(ids, attention_mask=None, **{cache_argument(prepare) or CACHE_NAME: cache})
    return SwitchingRope(model, switch_at, rereads=cache_in(prepared) is None)


class SwitchingRope(RopeByLength):
    """RoPE of a model whose frequencies switch at one sequence length (`longrope`)."""

    def __init__(self, model: nn.Module, switch_at: int, rereads: bool):
        """Find the rope modules of a model; the other arguments are attributes."""
        self.switch_at, self.rereads = switch_at, rereads
        self._modules = [module for module in model.modules() if "longrope" in _kinds(module).values()]

    def prefix_key(self, prompt: int) -> Hashable:
        """Return whether the prompt is longer than the first context."""
        return prompt > self.switch_at

    def add_to(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token the frequencies of short or of long texts; see `RopeByLength`."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> tuple[Tensor, ...]:
            states = args[0] if args else kwargs["x"]
            positions = kwargs.get("position_ids")
            positions = args[1] if positions is None else positions
            rest = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
            rest |= {"layer_type": args[2]} if len(args) > 2 else {}
            # Both sets of frequencies come from the module itself, which chooses by the largest position that it sees.
            edge = positions.new_full((*positions.shape[:-1], 1), self.switch_at)
            far = module.forward(states, torch.cat([positions, edge], dim=-1), **rest)
            near = module.forward(states, positions.clamp(max=self.switch_at - 1), **rest)
            long = torch.maximum(positions + 1, at_least().to(positions.device)) > self.switch_at
            return tuple(torch.where(long[..., None], a[..., :-1, :], b) for a, b in zip(far, near, strict=True))

        for module in self._modules:
            patch.hook(module, hook, with_kwargs=True)


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of rope that a module computes, by the type of layers; by None where all layers have one."""
    kind: object = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {name: x for name, x in kind.items() if isinstance(x, str)}
    return {None: kind} if isinstance(kind, str) else {}


def find_dynamic_rope(model: nn.Module) -> "DynamicRope | None":
    """Return a model's RoPE if it is `dynamic` and each token can have its own frequencies; else None.

    Otherwise sequences end where the frequencies would change.
    """
    layouts: dict[nn.Module, dict[str | None, _Layout]] = {}
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            if "dynamic" in kind:
                try:
                    layouts.setdefault(module, {})[layer_type] = _Layout(module, layer_type)
                except MODEL_ERRORS:
                    return None
    return DynamicRope(model, layouts) if layouts else None


class _Layout:
    """Describes the output of a module with `dynamic` RoPE for layers of one type.

    Attributes:
        first: Length up to which a sequence has the frequencies of short ones.
        context: Tokens that texts may come to.
        theta: Base of the frequencies of short sequences.
        factor: Growth rate of the base with the sequence length.
        short: The frequencies of short sequences, `[F]` float32.
        exponents: The exponent of the base in each frequency, `[F]` float32.
        columns: Index of the frequency in each column of the sines, `[D]` int64.
        scale: Factor of the sines and cosines.
        follows: Whether sines and cosines have the dtype of the hidden states, and not float32.
    """

    def __init__(self, module: Any, layer_type: str | None):
        """Infer the form of a module's output for layers of a type from its output for a short sequence.

        Raises `AssertionError` if the output is different; other errors may come from the module.
        """
        config = module.config
        kind = {} if layer_type is None else {"layer_type": layer_type}
        entry = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        self.first, self.factor = first, factor = config.max_position_embeddings, float(entry["factor"])
        assert module.original_max_seq_len == first, "frequencies change elsewhere"
        assert not hasattr(module, "mrope_section"), "a token has several positions"
        prefix = "" if layer_type is None else f"{layer_type}_"
        self.short = short = getattr(module, f"{prefix}original_inv_freq").float()
        positions = torch.tensor([[0, 1, min(7, first - 2), first - 2]], device=short.device)
        x = short.new_zeros(1, positions.shape[1], 1)
        cos, sin = module(x, positions, **kind)
        self.scale = float(cos[0, 0, 0])
        # At position 1 the angle is the frequency, so the nearest sine identifies each column's frequency.
        self.columns = (sin[0, 1, :, None] / self.scale - short.sin()).abs().argmin(dim=1)
        self.exponents = torch.arange(0, 2 * len(short), 2, device=short.device).float() / (2 * len(short))
        trained = entry.get("original_max_position_embeddings") or first
        self.context = max(first, int(factor * trained))
        self.follows = module(x.bfloat16(), positions, **kind)[0].dtype == torch.bfloat16
        self.theta = float(entry["rope_theta"])
        for ours, theirs in zip(self.rotate(x, positions, torch.zeros_like(positions)), (cos, sin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        length = torch.tensor(2 * first, device=short.device)
        long = ROPE_INIT_FUNCTIONS["dynamic"](config, short.device, seq_len=length, **kind)[0]
        torch.testing.assert_close(self.frequencies(length[None]), long, rtol=1e-4, atol=0)

    def frequencies(self, length: Tensor) -> Tensor:
        """Return the frequencies for some sequence lengths, `[..., F]` float32; length: `[..., 1]` int64."""
        # The formula of transformers' dynamic NTK scaling.
        growth = self.factor * length.clamp(min=self.first) / self.first - (self.factor - 1)
        count = 2 * len(self.short)
        base = self.theta * growth ** (count / (count - 2))
        long = 1.0 / base ** self.exponents.to(length.device)
        return torch.where(length > self.first, long, self.short.to(length.device))

    def rotate(self, x: Tensor, positions: Tensor, at_least: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of tokens at positions `[...]`, `[..., D]` each, on the device of `x`."""
        positions = positions.to(x.device)
        dtype = x.dtype if self.follows else torch.float32
        length = torch.maximum(positions + 1, at_least.to(x.device))
        angles = positions[..., None].float() * self.frequencies(length[..., None])
        angles = angles[..., self.columns.to(x.device)]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


class _PerToken(nn.Module):
    """A stand-in for a module with `dynamic` RoPE, which would use the last token's frequencies for all tokens."""

    def __init__(self, module: nn.Module, layouts: dict[str | None, _Layout], running: Running):
        super().__init__()
        self.module, self.layouts, self.running = module, layouts, running
        self.train(module.training)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> object:
        """Return cosines and sines as the module does, with each token's own frequencies."""
        if layer_type not in self.layouts or self.running.elsewhere():
            return self.module(x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        return self.layouts[layer_type].rotate(x, position_ids, self.running.value())


class DynamicRope(RopeByLength):
    """RoPE of a model whose frequencies change with every token past its first context (`dynamic`).

    Attributes:
        context: Tokens that texts may come to.
    """

    rereads = False

    def __init__(self, model: nn.Module, layouts: dict[nn.Module, dict[str | None, _Layout]]):
        """Make stand-ins for the RoPE modules of a model; layouts: their outputs by the type of layers."""
        of_all = [layout for by_type in layouts.values() for layout in by_type.values()]
        self.switch_at, self.context = (min(x) for x in zip(*((y.first, y.context) for y in of_all), strict=True))
        self._running = Running()  # holds `at_least` of `add_to`
        stand_ins = {module: _PerToken(module, by_type, self._running) for module, by_type in layouts.items()}
        self._places = find_places(model, stand_ins)

    def prefix_key(self, prompt: int) -> Hashable:
        """Return the length of a prompt past the first context."""
        return prompt if prompt > self.switch_at else None

    def add_to(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token the frequencies of its own length; see `RopeByLength`."""
        patch.put_stand_ins(self._places, self._running, at_least)
