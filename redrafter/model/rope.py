"""Rope whose frequencies follow from the length of a text, of the kinds `longrope` and `dynamic`.

transformers decides by the longest position of a forward, for all rows of a batch, and keys stay in the cache as they
were rotated. So where a row is decoded alone, the token at position p behind a prompt of P tokens is rotated by the
frequencies of a text of max(P, p + 1) tokens. Here each token is given those of its own row, whatever is in its
forward: a row's text does not depend on its batch, and is what transformers writes for the row alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from redrafter.cache.dense import DenseCache
from redrafter.model.patch import ModelPatch, Running
from redrafter.model.supported import MODEL_ERRORS
from redrafter.tree.token_tree import Tree


class RopeByLength(ABC):
    """The rope of a model whose frequencies follow from the length of a text.

    Attributes:
        switch_at: Tokens up to which a text has the frequencies of short texts.
        rereads: Whether the model's `generate` reads a text again, with the frequencies of long texts, once it has
            `switch_at` tokens and goes on. Other models leave in the cache what is there.
    """

    switch_at: int
    rereads: bool

    def drop_past_switch(self, tree: Tree, length: Tensor) -> Tree:
        """Return the tree without the tokens past the switch, in rows that are read again there.

        Those tokens cannot be accepted; the row, of `length` `[B]` committed tokens, continues from there in the next
        step.
        """
        if not self.rereads:
            return tree
        past = length[:, None] + tree.depth >= self.switch_at  # [B, N]
        return replace(tree, tokens=tree.tokens.masked_fill(past & (length < self.switch_at)[:, None], -1))

    def prompt_length(self, prompt: int, read: int) -> int:
        """Return the least length of text whose frequencies a prompt's tokens have.

        Of a row that was preempted more tokens are `read` than its prompt has.
        """
        return max(prompt, read) if self.rereads else prompt

    def keeps_keys(self, prompt: int, longest: int) -> bool:
        """Tell whether the keys after a prompt stay as they are while a text grows to `longest` tokens."""
        return not self.rereads or prompt > self.switch_at or longest <= self.switch_at

    @abstractmethod
    def prefix_key(self, prompt: int) -> Hashable:
        """Return what prompts must have in common to have the same keys of the same tokens. prompt: its tokens."""

    @abstractmethod
    def apply(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token of a forward the frequencies of its own row.

        Args:
            patch: The patch of the forward.
            at_least: Returns the length of text whose frequencies each token has at least, int64 in a shape that
                broadcasts to that of the positions; a token whose own position is later has those of its position.
        """


def find_switching_rope(model: Any, config: Any, cache: DenseCache) -> "RopeByLength | None":
    """Return the rope of a model where it switches, and what the model's own `generate` does then; else None.

    The cache is an empty one for one row.
    """
    switch_at = _switch_length(config)
    if switch_at is None:
        return None
    cache.committed = switch_at
    ids = torch.zeros(1, switch_at + 1, dtype=torch.long, device=model.device)
    prepared = model.prepare_inputs_for_generation(ids, past_key_values=cache, attention_mask=None)
    return SwitchingRope(model, switch_at, rereads=prepared.get("past_key_values") is None)


def _switch_length(config: Any) -> int | None:
    """Return the number of tokens past which `longrope` has other frequencies; None where it never switches."""
    whole, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):  # of all kinds of layers
        if entry.get("rope_type") == "longrope":
            first = entry.get("original_max_position_embeddings")
            first = first or getattr(config, "original_max_position_embeddings", None) or whole
            return None if first is None or (whole is not None and whole <= first) else first
    return None


class SwitchingRope(RopeByLength):
    """The rope of a model whose frequencies switch at a length of text (`longrope`)."""

    def __init__(self, model: nn.Module, switch_at: int, rereads: bool):
        """Find the rope modules of a model; the other arguments are attributes."""
        self.switch_at, self.rereads = switch_at, rereads
        self._modules = [module for module in model.modules() if "longrope" in _kinds(module).values()]

    def prefix_key(self, prompt: int) -> Hashable:
        """Return whether the prompt is longer than the first context; see `RopeByLength`."""
        return prompt > self.switch_at

    def apply(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token the frequencies of short or of long texts; see `RopeByLength`."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> tuple[Tensor, ...]:
            states, positions = args[0] if args else kwargs["x"], kwargs.get("position_ids")
            positions = args[1] if positions is None else positions
            rest = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
            rest |= {"layer_type": args[2]} if len(args) > 2 else {}
            edge = positions.new_full((*positions.shape[:-1], 1), self.switch_at)
            far = module.forward(states, torch.cat([positions, edge], dim=-1), **rest)
            near = module.forward(states, positions.clamp(max=self.switch_at - 1), **rest)
            long = torch.maximum(positions + 1, at_least().to(positions.device)) > self.switch_at
            return tuple(torch.where(long[..., None], a[..., :-1, :], b) for a, b in zip(far, near, strict=True))

        for module in self._modules:
            patch.hook(module, hook, with_kwargs=True)


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of rope that a module computes, by the type of layers; by None where all layers have one."""
    kind: Any = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {name: x for name, x in kind.items() if isinstance(x, str)}
    return {None: kind} if isinstance(kind, str) else {}


def find_dynamic_rope(model: nn.Module) -> "DynamicRope | None":
    """Return the rope of a model where it is `dynamic`, and each token can be given its own frequencies; else None.

    Without it, texts end where the frequencies would change.
    """
    layouts: dict[nn.Module, dict[str | None, _Layout]] = {}
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            if "dynamic" in kind:
                try:
                    layouts.setdefault(module, {})[layer_type] = _Layout.of(module, layer_type)
                except MODEL_ERRORS:
                    return None
    return DynamicRope(model, layouts) if layouts else None


@dataclass(frozen=True)
class _Layout:
    """Describes what a module with `dynamic` rope returns for layers of one type.

    Attributes:
        first: Tokens up to which a text has the frequencies of short texts.
        context: Tokens that texts may come to.
        theta: Base of the frequencies of short texts.
        factor: How fast the base grows with the length of a text.
        short: The frequencies of short texts, `[F]` float32.
        exponents: The exponent of the base in each frequency, `[F]` float32.
        columns: Which frequency each column of the sines has, `[D]` int64.
        scale: Factor of the sines and cosines.
        follows: Whether both have the dtype of the hidden states, and not float32.
    """

    first: int
    context: int
    theta: float
    factor: float
    short: Tensor
    exponents: Tensor
    columns: Tensor
    scale: float
    follows: bool

    @classmethod
    def of(cls, module: Any, layer_type: str | None) -> "_Layout":
        """Learn what a module returns for layers of a type from what it returns for a short text.

        `AssertionError` is raised where it returns something else; other errors may come from the module.
        """
        config, kind = module.config, {} if layer_type is None else {"layer_type": layer_type}
        entry = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        first, factor = config.max_position_embeddings, float(entry["factor"])
        assert module.original_max_seq_len == first, "frequencies change elsewhere"
        assert not hasattr(module, "mrope_section"), "a token has several positions"
        prefix = "" if layer_type is None else f"{layer_type}_"
        short = getattr(module, f"{prefix}original_inv_freq").float()
        positions = torch.tensor([[0, 1, min(7, first - 2), first - 2]], device=short.device)
        x = short.new_zeros(1, positions.shape[1], 1)
        cos, sin = module(x, positions, **kind)
        scale = float(cos[0, 0, 0])
        columns = (sin[0, 1, :, None] / scale - short.sin()).abs().argmin(dim=1)
        exponents = torch.arange(0, 2 * len(short), 2, device=short.device).float() / (2 * len(short))
        trained = entry.get("original_max_position_embeddings") or first
        context = max(first, int(factor * trained))
        follows = module(x.bfloat16(), positions, **kind)[0].dtype == torch.bfloat16
        theta = float(entry["rope_theta"])
        layout = cls(first, context, theta, factor, short, exponents, columns, scale, follows)
        for ours, theirs in zip(layout.rotate(x, positions, torch.zeros_like(positions)), (cos, sin), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        length = torch.tensor(2 * first, device=short.device)
        long = ROPE_INIT_FUNCTIONS["dynamic"](config, short.device, seq_len=length, **kind)[0]
        torch.testing.assert_close(layout.frequencies(length[None]), long, rtol=1e-4, atol=0)
        return layout

    def frequencies(self, length: Tensor) -> Tensor:
        """Return the frequencies of texts of some lengths, `[..., F]` float32; lengths: `[..., 1]` int64."""
        growth = self.factor * length.clamp(min=self.first) / self.first - (self.factor - 1)
        count = 2 * len(self.short)
        base = self.theta * growth ** (count / (count - 2))
        long = 1.0 / base ** self.exponents.to(length.device)
        return torch.where(length > self.first, long, self.short.to(length.device))

    def rotate(self, x: Tensor, positions: Tensor, at_least: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of tokens at positions `[...]`, `[..., D]` each, on the device of `x`."""
        positions, dtype = positions.to(x.device), x.dtype if self.follows else torch.float32
        length = torch.maximum(positions + 1, at_least.to(x.device))
        angles = positions[..., None].float() * self.frequencies(length[..., None])
        angles = angles[..., self.columns.to(x.device)]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


class _PerToken(nn.Module):
    """A stand-in for a module with `dynamic` rope, which would give all tokens the frequencies of the last one."""

    def __init__(self, module: nn.Module, layouts: dict[str | None, _Layout], running: Running):
        super().__init__()
        self.module, self.layouts, self.running = module, layouts, running
        self.train(module.training)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cosines and sines as the module does, with each token's own frequencies."""
        if layer_type not in self.layouts or self.running.elsewhere():
            return self.module(x, position_ids, **({} if layer_type is None else {"layer_type": layer_type}))
        return self.layouts[layer_type].rotate(x, position_ids, self.running.value())


class DynamicRope(RopeByLength):
    """The rope of a model whose frequencies change with every token past its first context (`dynamic`).

    Attributes:
        context: Tokens that texts may come to.
    """

    rereads = False

    def __init__(self, model: nn.Module, layouts: dict[nn.Module, dict[str | None, _Layout]]):
        """Stand in for the rope modules of a model; layouts: what each returns, by the type of layers."""
        of_all = [layout for by_type in layouts.values() for layout in by_type.values()]
        self.switch_at, self.context = (min(x) for x in zip(*((y.first, y.context) for y in of_all), strict=True))
        self._running = Running()  # holds `at_least` of `apply`
        stand_ins = {module: _PerToken(module, by_type, self._running) for module, by_type in layouts.items()}
        self._places = [
            (parent, name, stand_ins[child])
            for parent in model.modules()
            for name, child in parent.named_children()
            if child in stand_ins
        ]

    def prefix_key(self, prompt: int) -> Hashable:
        """Return the length of a prompt past the first context; see `RopeByLength`."""
        return prompt if prompt > self.switch_at else None

    def apply(self, patch: ModelPatch, at_least: Callable[[], Tensor]) -> None:
        """Give each token the frequencies of its own length; see `RopeByLength`."""
        patch.tell(self._running, at_least)
        for parent, name, stand_in in self._places:
            patch.put(parent._modules, name, stand_in)
