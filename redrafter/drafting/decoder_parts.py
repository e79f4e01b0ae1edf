"""Parts of decoder layers that drafters of several kinds compute drafts with."""

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class LayerConfig(Protocol):
    """What the config of a drafter with decoder layers says of them."""

    intermediate_size: int
    hidden_act: str
    mlp_bias: bool
    head_dim: int
    rope: dict[str, Any]
    max_position_embeddings: int


class GatedMLP(nn.Module):
    """The gated MLP of a layer of some width."""

    def __init__(self, width: int, config: LayerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to `[..., D]`."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, position: Tensor, config: LayerConfig) -> Tensor:
    """Rotate heads `[..., h, d]` by positions that broadcast to `[...]`, and return them in their dtype."""
    rope = tuple(sorted((key, tuple(x) if isinstance(x, list) else x) for key, x in config.rope.items()))
    frequency, scale = _rope(rope, config.head_dim, config.max_position_embeddings, x.device)
    angle = (position[..., None] * frequency)[..., None, :]  # [..., 1, d / 2]
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


@lru_cache(maxsize=16)
def _rope(
    rope: tuple[tuple[str, Any], ...], head_dim: int, max_position_embeddings: int, device: torch.device
) -> tuple[Tensor, float]:
    """Return the frequencies of a rope, `[d / 2]` float32, and what its sines and cosines are scaled by.

    It is computed once for each rope and device: a captured step may copy nothing from the host.

    Args:
        rope: Items of `rope` of a config.
        head_dim: d.
        max_position_embeddings: Positions that the rope was made for.
        device: Where the frequencies go.
    """
    parameters = dict(rope)
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
    """Return what belongs to some beams `sources` `[B, W]` of the step before, of `x` `[B, w, ...]`."""
    index = sources.view(*sources.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)
