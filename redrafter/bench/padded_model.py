"""A small model at a large one's cost: the same text, from weights padded to the large shape.

A trained pair writes real text but is too small to measure a GPU with; an untrained large model has the cost but writes
noise that no drafter can guess. Padding has both. The residual stream gets dims that stay zero, attention gets heads
and the MLP neurons that nobody reads, the stack gets layers that add nothing, and the head gets rows whose logits are
masked. Every kernel runs at the large shape; the real numbers come out as they were, up to rounding.

The mean square of a vector that zeros were added to is d/D of what it was, D of d dims. So a norm's weights are scaled
by the root of d/D and its epsilon by d/D, and so are the drafter's weights that read the outputs of layers, which it
brings to a root mean square of 1.

Added weights are random, so that nothing is timed on zeros, except where a zero is what makes it exact: the added
columns of the embedding, and all of `o_proj` and `down_proj` (and of the drafter's head) but the real block.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.errors import ArgumentError

__all__ = ["SHAPES", "PadShape", "PaddedHead", "describe", "pad_drafter", "pad_model", "unmasked"]

STD = 0.02  # of added weights: what Llama models are initialised with


@dataclass(frozen=True)
class PadShape:
    """What sets a Llama's cost, under the names that `LlamaConfig` has for it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"PadShape.{name} must be a positive integer, got {value!r}")
        for whole, part in (("num_attention_heads", "num_key_value_heads"), ("hidden_size", "num_attention_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ArgumentError(
                    f"PadShape.{whole} must be a multiple of {part}={getattr(self, part)}, got {getattr(self, whole)}"
                )


SHAPES = {
    "llama-3.1-8b": PadShape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3.2-1b": PadShape(2048, 8192, 16, 32, 8, 64, 128256),
}


def describe(shape_name: str, base_name: str) -> str:
    """The sentence that every table of a padded model carries."""
    return (
        f"This is {base_name}'s text at {shape_name}'s cost: {base_name} zero-padded to that shape, "
        f"not a {shape_name} model."
    )


class PaddedHead(nn.Linear):
    """A head `[V, D]` whose rows from `real` on are computed like the others, and can never be drawn."""

    def __init__(self, hidden_size: int, vocab_size: int, real: int):
        super().__init__(hidden_size, vocab_size, bias=False)
        self.real = real

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)  # [..., V]
        logits[..., self.real :].fill_(float("-inf"))
        return logits


@contextmanager
def unmasked(model: PreTrainedModel) -> Iterator[None]:
    """Bind a padded model under this: a `Target` compares logits, and the difference of two -inf is not a number."""
    head: Any = model.get_output_embeddings()
    assert isinstance(head, PaddedHead)
    real, head.real = head.real, head.out_features
    try:
        yield
    finally:
        head.real = real


@torch.no_grad()
def pad_model(
    model: LlamaForCausalLM, shape: PadShape, *, device: str | torch.device, seed: int = 0
) -> PreTrainedModel:
    """The same function in another shape: equal logits for the model's V ids, -inf for the added ones.

    The result is in the model's dtype, built on `device` and held there once; it is for inference and is not to be
    saved, as a checkpoint does not know its head. seed: of the added weights.
    Raises `ArgumentError` when the model is no plain Llama or does not fit into the shape.
    """
    _check_fits(model.config, shape)
    config = copy.deepcopy(model.config)
    for name, value in asdict(shape).items():
        setattr(config, name, value)
    small, large = model.config.hidden_size, shape.hidden_size
    config.rms_norm_eps = model.config.rms_norm_eps * small / large
    config.tie_word_embeddings = False
    with torch.device("meta"):  # costs nothing; `_on` allocates
        padded: Any = LlamaForCausalLM(config)
        padded.lm_head = PaddedHead(large, shape.vocab_size, model.config.vocab_size)
    padded = _on(padded, device, model.dtype, seed)
    padded.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to(device)  # its buffers are not weights
    padded.generation_config = copy.deepcopy(model.generation_config)

    padded.model.embed_tokens.weight[:, small:] = 0
    _corner(padded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    _corner(padded.lm_head.weight, model.lm_head.weight)
    _scale_norm(padded.model.norm.weight, model.model.norm.weight)
    for layer in padded.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for big, own in zip(padded.model.layers, model.model.layers, strict=False):  # further layers add nothing
        _scale_norm(big.input_layernorm.weight, own.input_layernorm.weight)
        _scale_norm(big.post_attention_layernorm.weight, own.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _corner(
                _by_head(getattr(big.self_attn, name).weight, name, shape),
                _by_head(getattr(own.self_attn, name).weight, name, model.config),
            )
        for name in ("gate_proj", "up_proj", "down_proj"):
            _corner(getattr(big.mlp, name).weight, getattr(own.mlp, name).weight)
    return padded


@torch.no_grad()
def pad_drafter(
    drafter: RecurrentDrafter,
    hidden_size: int,
    vocab_size: int,
    *,
    head_rank: int | None = None,
    device: str | torch.device,
    seed: int = 0,
) -> RecurrentDrafter:
    """The drafter of a padded model, with the same logits over the same ids.

    hidden_size, vocab_size: of the padded model. The exit dim, the gate and what fuses the target's layers grow with
    the hidden size; the layers that are read keep their numbers. The head keeps its rows, as a drafter learns the ids
    that a target writes. head_rank: of the padded head, where the drafter's has one; None: it grows with the hidden
    size. seed: of the added weights.
    Raises `ArgumentError` when the drafter is larger, or its head has no rank to pad.
    """
    d, e, r = drafter.config.hidden_size, drafter.config.exit_dim, drafter.config.head_rank
    if r is None and head_rank is not None:
        raise ArgumentError(f"this drafter's head has no head_rank that could be padded to {head_rank}: give none")
    config = copy.deepcopy(drafter.config)
    config.hidden_size, config.vocab_size, config.exit_dim = hidden_size, vocab_size, e * hidden_size // d
    if r is not None:
        config.head_rank = r * hidden_size // d if head_rank is None else head_rank
    for name in ("hidden_size", "vocab_size", *(["head_rank"] if r else [])):
        _check_grows(name, getattr(drafter.config, name), getattr(config, name))
    config.rms_norm_eps = drafter.config.rms_norm_eps * d / hidden_size
    config.draft_vocab_size = drafter.lm_head.out_features
    config.base_embedding_norms = None  # added ids moved the rows that a base is told by
    with torch.device("meta"):
        module: Any = RecurrentDrafter(config)
    padded: RecurrentDrafter = _on(module, device, drafter.dtype, seed)
    assert padded.draft_ids is not None
    padded.draft_ids.copy_(torch.arange(config.draft_vocab_size) if drafter.draft_ids is None else drafter.draft_ids)

    # Zero where added: an embedding, and h, unless it is fused from the outputs of layers, which are zero there too.
    h_silent = drafter.fuse is None
    if drafter.fuse is not None:
        assert padded.fuse is not None
        parts = (1 + len(config.target_layers), d)
        _connect(padded.fuse, drafter.fuse, (1, d), parts, silent=range(parts[0]))
        read = padded.fuse.weight.unflatten(1, (parts[0], hidden_size))  # [D, 1 + layers, D]
        read[:d, 1:, :d] *= (d / hidden_size) ** 0.5
    if config.rnn and config.recurrence == "gated":
        _connect(padded.rnn_gate, drafter.rnn_gate, (2, d), (3, d), silent=(0, 2) if h_silent else (0,))  # [e; s; h]
    elif config.rnn:
        _connect(padded.rnn_w, drafter.rnn_w, (1, d), (1, d), silent=(0,))
        _connect(padded.rnn_u, drafter.rnn_u, (1, d), (1, d))
    exit_parts = (2, d) if drafter.input_proj is None else (1, e)  # [h; s] itself, or a projection of it
    if drafter.input_proj is not None:
        assert padded.input_proj is not None
        _connect(padded.input_proj, drafter.input_proj, exit_parts, (2, d), silent=(0,) if h_silent else ())
    for index, (big, own) in enumerate(zip(padded.layers, drafter.layers, strict=True)):
        reads_h = index == 0 and drafter.input_proj is None  # what a layer puts there is not zero
        silent = (0,) if reads_h and h_silent else ()
        _connect(big.linear, own.linear, exit_parts, exit_parts, silent)  # type: ignore[arg-type]
    head_parts = exit_parts
    if drafter.head_proj is not None:
        assert padded.head_proj is not None and r is not None
        head_parts = (1, r)
        _connect(padded.head_proj, drafter.head_proj, head_parts, exit_parts)
    _connect(padded.lm_head, drafter.lm_head, (1, drafter.lm_head.out_features), head_parts)
    return padded


def _check_fits(config: Any, shape: PadShape) -> None:
    if config.model_type != "llama":
        raise ArgumentError(f"only a model of type 'llama' can be padded, got {config.model_type!r}")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name):
            raise ArgumentError(f"only a Llama without biases can be padded, but this one has {name}=True")
    if config.head_dim != shape.head_dim:
        raise ArgumentError(f"head_dim cannot be padded: the model has {config.head_dim}, the shape {shape.head_dim}")
    for name, value in asdict(shape).items():
        _check_grows(name, getattr(config, name), value)
    own, large = (x.num_attention_heads // x.num_key_value_heads for x in (config, shape))
    if own > large:
        raise ArgumentError(
            f"heads cannot be placed: {own} of the model's read one key-value head, but only {large} of the shape's do"
        )


def _check_grows(name: str, own: int, asked: int) -> None:
    if asked < own:
        raise ArgumentError(f"cannot pad {name}={own} to {asked}; choose a shape that is at least as large")


def _on(module: Any, device: str | torch.device, dtype: torch.dtype, seed: int) -> Any:
    """A module from the meta device, for inference, all its weights random."""
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in module.parameters():
        parameter.normal_(std=STD, generator=generator)
    return module


def _corner(big: Tensor, small: Tensor) -> None:
    """Write `small` into the leading corner of `big`, of as many dims."""
    big[tuple(slice(size) for size in small.shape)].copy_(small)


def _scale_norm(big: Tensor, small: Tensor) -> None:
    """An RMSNorm divides by the root of the mean square, which zeros dilute: d/D of it is left in D dims."""
    _corner(big, small * (len(small) / len(big)) ** 0.5)


def _by_head(weight: Tensor, name: str, shape: Any) -> Tensor:
    """The heads' axis as its own axes, so that a head's place in the corner says which key-value head it reads."""
    groups, head_dim = shape.num_key_value_heads, shape.head_dim
    if name in ("k_proj", "v_proj"):
        return weight.unflatten(0, (groups, head_dim))  # [kv, head_dim, D]
    heads = (groups, shape.num_attention_heads // groups, head_dim)
    return weight.unflatten(int(name == "o_proj"), heads)  # [kv, group, head_dim, D], o_proj [D, kv, group, head_dim]


def _connect(
    big: nn.Linear, small: nn.Linear, outs: tuple[int, int], ins: tuple[int, int], silent: Collection[int] = ()
) -> None:
    """Let real outputs read real inputs only.

    outs, ins: `(parts, size)` of the small side: an axis of `parts` vectors one after the other, each padded by itself.
    silent: the input parts that are zero where they were padded; what reads those stays random.
    """
    shape = (outs[0], big.out_features // outs[0], ins[0], big.in_features // ins[0])
    weight = big.weight.view(shape)  # [parts, M, parts, N]
    for part in set(range(ins[0])) - set(silent):
        weight[:, : outs[1], part, ins[1] :] = 0
    _corner(weight, small.weight.view(*outs, *ins))
    if small.bias is not None:
        _corner(big.bias.view(shape[:2]), small.bias.view(outs))
