"""Rope whose frequencies switch where a text outgrows the context that its model was first trained on (`longrope`).

transformers decides by the longest position of a forward, for all rows of a batch. Here each row has its own
frequencies: those of long texts when its prompt is longer than the first context, or once decoding has reached that
length. So a row's text does not depend on its batch, and is what transformers writes for the row alone.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.cache.dense import DenseCache
from redrafter.tree.token_tree import Tree

__all__ = ["SwitchingRope", "dynamic_context", "find_rope", "warn_of_dynamic_rope"]


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters of all kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(entry for entry in rope.values() if isinstance(entry, dict))]


def _first_context(config: Any, kind: str) -> int | None:
    """Return the context that a model was first trained on, where its rope is of this kind; else None."""
    for entry in _rope_entries(config):
        if entry.get("rope_type") == kind:
            whole = getattr(config, "max_position_embeddings", None)
            in_entry = entry.get("original_max_position_embeddings")
            return in_entry or getattr(config, "original_max_position_embeddings", None) or whole
    return None


def dynamic_context(config: Any) -> int | None:
    """Return the number of positions up to which rope of the kind `dynamic` is constant; None for other kinds."""
    return _first_context(config, "dynamic")


def warn_of_dynamic_rope(config: Any, name: str) -> None:
    """Warn where dynamic rope limits texts to a part of a model's context.

    Args:
        config: Config of the model's decoder.
        name: What to call the model.
    """
    usable, whole = dynamic_context(config), getattr(config, "max_position_embeddings", None)
    if usable is not None and whole is not None and usable < whole:
        warnings.warn(
            f"{name} has dynamic rope, whose frequencies change with every token past {usable}: texts of up to "
            f"{usable} tokens are written, of the {whole} that the model is made for",
            stacklevel=4,
        )


def find_rope(model: Any, config: Any, cache: DenseCache) -> "SwitchingRope | None":
    """Return the rope of a model where it switches, and what the model's own `generate` does then; else None.

    Args:
        model: The causal LM.
        config: Config of its decoder.
        cache: An empty cache for one row.
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
    first, whole = _first_context(config, "longrope"), getattr(config, "max_position_embeddings", None)
    return None if first is None or (whole is not None and whole <= first) else first


class SwitchingRope:
    """The rope of a model whose frequencies switch at a length of text.

    Attributes:
        switch_at: Tokens past which a text has the frequencies of long texts.
        rereads: Whether the model's `generate` reads a text again, with the frequencies of long texts, once it has
            `switch_at` tokens and goes on. Other models leave in the cache what is there.
    """

    def __init__(self, model: nn.Module, switch_at: int, rereads: bool):
        """Find the rope modules of a model; the other arguments are attributes."""
        self.switch_at, self.rereads = switch_at, rereads
        kinds = ((module, getattr(module, "rope_type", None)) for module in model.modules())
        self._modules = [
            module
            for module, kind in kinds
            if kind == "longrope" or (isinstance(kind, dict) and "longrope" in kind.values())
        ]

    def drop_past_switch(self, tree: Tree, length: Tensor) -> Tree:
        """Return the tree without the tokens past the switch, in rows that have not reached it.

        Those tokens cannot be accepted; the row goes on from there in the next step.

        Args:
            tree: The trees of B rows.
            length: Committed tokens of each row, `[B]` int64.
        """
        past = length[:, None] + tree.depth >= self.switch_at  # [B, N]
        return replace(tree, tokens=tree.tokens.masked_fill(past & (length < self.switch_at)[:, None], -1))

    @contextmanager
    def choosing(self, long: Callable[[], Tensor]) -> Iterator[None]:
        """Give each token of the forwards inside the context the frequencies of its own row.

        Args:
            long: Returns whether each token is of a long text, bool in the shape of the positions; the others are
                before `switch_at`.
        """

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> tuple[Tensor, ...]:
            states, positions = args[0] if args else kwargs["x"], kwargs.get("position_ids")
            positions = args[1] if positions is None else positions
            rest = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
            rest |= {"layer_type": args[2]} if len(args) > 2 else {}
            edge = positions.new_full((*positions.shape[:-1], 1), self.switch_at)
            far = module.forward(states, torch.cat([positions, edge], dim=-1), **rest)
            near = module.forward(states, positions.clamp(max=self.switch_at - 1), **rest)
            chosen = long().to(positions.device)[..., None]
            return tuple(torch.where(chosen, a[..., :-1, :], b) for a, b in zip(far, near, strict=True))

        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield
