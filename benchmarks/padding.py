"""The arithmetic of padding: sizes that fit, and small weights within large ones that are random."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import ArgumentError

ADDED_WEIGHT_STD = 0.02  # initialisation of Llama and Qwen models


@dataclass(frozen=True)
class PadShape:
    """The sizes that set a model's cost, under the names of `LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        sizes = asdict(self)
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ArgumentError(f"PadShape.{name} must be a positive integer, got {value!r}")
        for whole, part in (("num_attention_heads", "num_key_value_heads"), ("hidden_size", "num_attention_heads")):
            if sizes[whole] % sizes[part]:
                raise ArgumentError(f"PadShape.{whole} must be a multiple of {part}={sizes[part]}, got {sizes[whole]}")


def check_fits(sizes: PadShape, shape: PadShape) -> None:
    """Raise `ArgumentError` unless a model of these sizes fits into a shape."""
    if sizes.head_dim != shape.head_dim:
        raise ArgumentError(f"head_dim cannot be padded: the model has {sizes.head_dim}, the shape {shape.head_dim}")
    for name, value in asdict(shape).items():
        check_grows(name, getattr(sizes, name), value)
    group, large_group = (x.num_attention_heads // x.num_key_value_heads for x in (sizes, shape))
    if group > large_group:
        raise ArgumentError(
            f"heads cannot be placed: {group} of the model's read one key-value head, but only {large_group} of the "
            "shape's do"
        )


def check_grows(name: str, size: int, asked: int) -> None:
    """Raise `ArgumentError` if a size would shrink."""
    if asked < size:
        raise ArgumentError(f"cannot pad {name}={size} to {asked}; choose a shape that is at least as large")


def random_on(module: Any, device: str | torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Move a module from the meta device to `device`, for inference, with random weights."""
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in module.parameters():
        parameter.normal_(std=ADDED_WEIGHT_STD, generator=generator)
    return module


def corner(big: Tensor, small: Tensor) -> None:
    """Write a small tensor over the first numbers of each dim of a big one."""
    big[tuple(slice(size) for size in small.shape)].copy_(small)


def by_head(weight: Tensor, name: str, sizes: PadShape) -> Tensor:
    """Split the axis of heads by key-value head, so that a corner keeps each head with the key-value head it reads."""
    groups, head_dim = sizes.num_key_value_heads, sizes.head_dim
    if "k_proj" in name or "v_proj" in name:
        return weight.unflatten(0, (groups, head_dim))  # [kv, head_dim, D], a bias [kv, head_dim]
    heads = (groups, sizes.num_attention_heads // groups, head_dim)
    return weight.unflatten(int("o_proj" in name), heads)  # [kv, group, head_dim, D], o_proj [D, kv, group, head_dim]
