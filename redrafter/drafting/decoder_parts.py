"""Parts of decoder layers that drafters of several kinds compute drafts with."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from redrafter.drafting.drafter_config import LayerConfig


class AttentionProducts(nn.Module):
    """The products of a layer's attention, and its norms of queries and keys where the config asks for them.

    Args:
        width: Width of what queries, keys and values read.
        config: The config of the drafter.
        normed: Whether the heads of queries and keys are normalised.
    """

    def __init__(self, width: int, config: LayerConfig, normed: bool):
        super().__init__()
        self.config, bias, size, eps = config, config.attention_bias, config.head_dim, config.rms_norm_eps
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.width, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps) if normed else None
        self.k_norm = nn.RMSNorm(size, eps) if normed else None

    def by_head(self, x: Tensor) -> Tensor:
        """Return a product `[..., h d]` by heads, `[..., h, d]`."""
        return x.unflatten(-1, (-1, self.config.head_dim))

    def finish_query(self, query: Tensor, position: "Tensor | Sines") -> Tensor:
        """Normalise queries `[..., h, d]` where the layer does so, and rotate them by positions that broadcast.

        Layers at the same positions may share their sines, which a compiled caller makes of `rope_of`.
        """
        return rotate(query if self.q_norm is None else self.q_norm(query), position, self.config)

    def finish_key(self, key: Tensor, position: "Tensor | Sines") -> Tensor:
        """Do the same with keys `[..., H, d]`."""
        return rotate(key if self.k_norm is None else self.k_norm(key), position, self.config)


class GatedMLP(nn.Module):
    """The gated MLP of a layer."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        width = config.width
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to `[..., D]`."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Sines(NamedTuple):
    """Cosines and sines that heads at some positions are rotated by, `[..., 1, d / 2]` float32 each."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def at(cls, position: Tensor, frequency: Tensor, scale: float) -> "Sines":
        """Return those of positions `[...]`, of a rope as `rope_of` returns it."""
        angle = (position[..., None] * frequency)[..., None, :]
        return cls(angle.cos() * scale, angle.sin() * scale)


def rotate(x: Tensor, position: Tensor | Sines, config: LayerConfig) -> Tensor:
    """Rotate heads `[..., h, d]` by positions that broadcast to `[...]`, and return them in their dtype."""
    if not isinstance(position, Sines):
        position = Sines.at(position, *rope_of(config, x.device))
    cosine, sine = position
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


def rope_of(config: LayerConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies of a layer's rope, `[d / 2]` float32, and the multiplier of its sines and cosines."""
    rope = tuple(sorted((key, tuple(x) if isinstance(x, list) else x) for key, x in config.rope.items()))
    return _rope(rope, config.head_dim, config.max_position_embeddings, device)


@lru_cache(maxsize=16)
def _rope(
    rope: tuple[tuple[str, Any], ...], head_dim: int, max_position_embeddings: int, device: torch.device
) -> tuple[Tensor, float]:
    """Return the frequencies of a rope, `[d / 2]` float32, and the multiplier of its sines and cosines.

    It is computed once for each rope and device: a captured step may copy nothing from the host.

    Args:
        rope: Items of `rope` of a config.
        head_dim: d.
        max_position_embeddings: Positions that the rope was made for.
        device: Where the frequencies go.
    """
    parameters = dict(rope)
    # A tensor made in inference mode could not take part in a training later, and the cache keeps it for both.
    with torch.inference_mode(False), torch.device("cpu"):
        if parameters["rope_type"] == "default":
            powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return (parameters["rope_theta"] ** -powers).to(device), 1.0
        config = LlamaConfig(
            head_dim=head_dim, max_position_embeddings=max_position_embeddings, rope_parameters=parameters
        )
        frequency, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        return frequency.to(device), scale


def of_beams(x: Tensor, sources: Tensor) -> Tensor:
    """Select the values of beams `sources` `[B, W]` of the step before from `x` `[B, w, ...]`."""
    index = sources.view(*sources.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)
