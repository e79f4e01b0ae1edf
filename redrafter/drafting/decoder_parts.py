"""Parts of decoder layers, and other computations, that drafters of several kinds share."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from redrafter.drafting.drafter_config import LayerConfig
from redrafter.drafting.drafter_model import FusedParts, partial_linear
from redrafter.model.linear_layers import fuse_layers


class RMSNorm(nn.RMSNorm):
    """An RMS norm that computes in the dtype of its weight where autocast has made its input of a lower one.

    torch has one kernel for inputs in the dtype of the weight, and computes others in eight.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., D]`."""
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype)))


class AttentionProducts(FusedParts):
    """The products of a layer's attention, and its norms of queries and keys where the config asks for them.

    Args:
        width: Width of the input of queries, keys and values.
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
        self.q_norm = RMSNorm(size, eps) if normed else None
        self.k_norm = RMSNorm(size, eps) if normed else None
        self._fused: tuple[Any, Any] = None, None  # no submodules: their weights are those of the layers above
        self._frequencies: tuple[Tensor, float] | None = None

    def fuse(self) -> None:
        """Make one product of queries, keys and values, and one of keys and values alone."""
        whole = fuse_layers([self.q_proj, self.k_proj, self.v_proj])
        self._fused = whole, None if whole is None else fuse_layers([self.k_proj, self.v_proj])

    def unfuse(self) -> None:
        """Compute the products one by one."""
        self._fused = None, None

    def heads_of(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the heads of inputs `[..., D]` at positions that broadcast to `[...]`, queries and keys finished.

        Queries are `[..., h, d]`, keys and values `[..., H, d]`. Where one product computes all, queries and keys are
        neighbours, which a compiler rotates in one kernel.
        """
        if self._fused[0] is None:
            query, key, value = (self.by_head(product(x)) for product in (self.q_proj, self.k_proj, self.v_proj))
            return self.finish_query(query, position), self.finish_key(key, position), value
        queries, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        heads = self.by_head(partial_linear(self._fused[0], x, slice(None), with_bias=True))
        rotated, value = heads.split([queries + keys, keys], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split([queries, keys], dim=-2)
            rotated = torch.cat([self.q_norm(query), self.k_norm(key)], dim=-2)
        query, key = self._rotate(rotated, position).split([queries, keys], dim=-2)
        return query, key, value

    def keys_and_values(self, x: Tensor, columns: slice, *, with_bias: bool) -> Tensor:
        """Return the terms that some input features `[..., C]`, in these columns, add to keys and values, `[..., 2Hd]`.

        Those of keys come first.
        """
        if self._fused[1] is not None:
            return partial_linear(self._fused[1], x, columns, with_bias=with_bias)
        sides = (partial_linear(product, x, columns, with_bias=with_bias) for product in (self.k_proj, self.v_proj))
        return torch.cat(list(sides), dim=-1)

    def by_head(self, x: Tensor) -> Tensor:
        """Return a product `[..., h d]` by heads, `[..., h, d]`."""
        return torch.unflatten(x, -1, (-1, self.config.head_dim))

    def finish_query(self, query: Tensor, position: "Tensor | Sines") -> Tensor:
        """Normalise queries `[..., h, d]` if the layer does so, and rotate them by positions that broadcast.

        Layers at the same positions may share their sines, which a compiled caller computes from `rope_of`.
        """
        return self._rotate(query if self.q_norm is None else self.q_norm(query), position)

    def finish_key(self, key: Tensor, position: "Tensor | Sines") -> Tensor:
        """Do the same with keys `[..., H, d]`."""
        return self._rotate(key if self.k_norm is None else self.k_norm(key), position)

    def find_frequencies(self, device: torch.device) -> None:
        """Look up the rope's frequencies, which a compiled step reads: it could not compute them."""
        if self._frequencies is None or self._frequencies[0].device != device:
            self._frequencies = rope_of(self.config, device)

    def _rotate(self, x: Tensor, position: "Tensor | Sines") -> Tensor:
        if not isinstance(position, Sines):
            self.find_frequencies(x.device)
            assert self._frequencies is not None
            position = Sines.at(position, *self._frequencies)
        return rotate(x, position)


class GatedMLP(FusedParts):
    """The gated MLP of a layer."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        width = config.width
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self._fused: tuple[Any] = (None,)  # no submodule: its weight is that of the layers above

    def fuse(self) -> None:
        """Make one product of the gate and the neurons."""
        self._fused = (fuse_layers([self.gate_proj, self.up_proj]),)

    def unfuse(self) -> None:
        """Compute the products one by one."""
        self._fused = (None,)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to `[..., D]`."""
        if self._fused[0] is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = partial_linear(self._fused[0], x, slice(None), with_bias=True).chunk(2, dim=-1)
        return partial_linear(self.down_proj, self.activation(gate) * up, slice(None), with_bias=True)


class Sines(NamedTuple):
    """Cosines and sines that heads at some positions are rotated by, `[..., 1, d / 2]` float32 each."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def at(cls, position: Tensor, frequency: Tensor, scale: float) -> "Sines":
        """Return those of positions `[...]`, of a rope as `rope_of` returns it."""
        angle = (position[..., None] * frequency)[..., None, :]
        return cls(angle.cos() * scale, angle.sin() * scale)


def rotate(x: Tensor, sines: Sines) -> Tensor:
    """Rotate heads `[..., h, d]` by the sines of their positions, in float32, and return them in their dtype."""
    cosine, sine = (part[..., None, :] for part in sines)  # [..., 1, 1, d / 2]
    halves, sign = torch.unflatten(x.float(), -1, (2, -1)), torch.arange(-1, 2, 2, device=x.device)[:, None]
    # Not a concatenation of two halves, which a compiler would compute in two kernels.
    return (halves * cosine + halves.flip(-2) * (sine * sign)).flatten(-2).to(x.dtype)


def rope_of(config: LayerConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies of a layer's rope, `[d / 2]` float32, and the multiplier of its sines and cosines."""
    rope = tuple(sorted((key, tuple(x) if isinstance(x, list) else x) for key, x in config.rope.items()))
    return _rope(rope, config.head_dim, config.max_position_embeddings, device)


@lru_cache(maxsize=16)
def _rope(rope: tuple[tuple[str, Any], ...], head_dim: int, longest: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies of a rope, `[d / 2]` float32, and the multiplier of its sines and cosines.

    It is computed once for each rope and device: a captured step must not copy from the host.

    Args:
        rope: Items of `rope` of a config.
        head_dim: d.
        longest: Positions that the rope was made for.
        device: Where the frequencies go.
    """
    parameters = dict(rope)
    # A tensor made in inference mode could not be used in training later, and the cache serves both.
    with torch.inference_mode(False), torch.device("cpu"):
        if parameters["rope_type"] == "default":
            powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return (parameters["rope_theta"] ** -powers).to(device), 1.0
        config = LlamaConfig(head_dim=head_dim, max_position_embeddings=longest, rope_parameters=parameters)
        frequency, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        return frequency.to(device), scale


def of_beams(x: Tensor, sources: Tensor) -> Tensor:
    """Select the values of beams `sources` `[B, W]` of the step before from `x` `[B, w, ...]`."""
    index = sources.view(*sources.shape, *(1 for _ in x.shape[2:])).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def normalise(x: Tensor, eps: float) -> Tensor:
    """RMS-normalise the last dimension in float32, without a weight, which the following product can absorb."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    return rms_norm(precise, x.shape[-1:], eps=eps).to(x)


def fuse_outputs(hidden: Tensor, fuse: nn.Module, width: int, eps: float) -> Tensor:
    """Add a product of all hidden states that a drafter reads to the last one, `[..., D]`.

    Args:
        hidden: The last hidden state, after the final norm, and then the outputs of layers, `[..., F]`.
        fuse: The product of the last one and the outputs, which are RMS-normalised first.
        width: D.
        eps: Epsilon of the norm.
    """
    last, outputs = hidden[..., :width], torch.unflatten(hidden[..., width:], -1, (-1, width))  # [..., layers, D]
    fused: Tensor = last + fuse(torch.cat([last, normalise(outputs, eps).flatten(-2)], dim=-1))
    return fused


def gated_state(product: Tensor, state: Tensor | None) -> Tensor:
    """Return the next state of a gated cell, `[..., D]`.

    Args:
        product: The gate before its sigmoid, and the candidate before its SiLU, `[..., 2D]`.
        state: The state before, `[..., D]`; None for zero.
    """
    gate, new = product.chunk(2, dim=-1)
    before = 0 if state is None else state
    # Equals (1 - g) s + g SiLU(c), with one product fewer.
    return before + gate.sigmoid() * (silu(new) - before)
