"""Pad drafters for a padded model, with unchanged drafts; `padded_model.py` says how."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from padding import PadShape, by_head, check_fits, check_grows, corner, random_on
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.eagle import EagleDrafter
from redrafter.errors import ArgumentError


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
    """Pad a drafter for a padded model: its logits are the same, over the same ids.

    The exit dim, the gate and the layer that fuses the target's hidden states grow with the hidden size; the indices of
    the target's layers are unchanged. The head keeps its rows, since a drafter learns the ids that a target generates.
    Context attention keeps its heads and its window.

    Args:
        drafter: The small model's drafter.
        hidden_size: Hidden size of the padded model.
        vocab_size: Vocabulary of the padded model.
        head_rank: Rank of the padded head, where the drafter's has one; None lets it grow with the hidden size.
        device: As of `pad_model`.
        seed: As of `pad_model`.

    Raises:
        ArgumentError: The drafter is larger than the padded model, or `head_rank` is given and its head has no rank.
    """
    d, e, r = drafter.config.hidden_size, drafter.config.exit_dim, drafter.config.head_rank
    if r is None and head_rank is not None:
        raise ArgumentError(f"this drafter's head has no head_rank that could be padded to {head_rank}: give none")
    config = copy.deepcopy(drafter.config)
    config.hidden_size, config.vocab_size, config.exit_dim = hidden_size, vocab_size, e * hidden_size // d
    if r is not None:
        config.head_rank = r * hidden_size // d if head_rank is None else head_rank
    for name in ("hidden_size", "vocab_size", *(["head_rank"] if r else [])):
        check_grows(name, getattr(drafter.config, name), getattr(config, name))
    # As in the model: padding lowers the mean square, so epsilon is lowered alike.
    config.rms_norm_eps = drafter.config.rms_norm_eps * d / hidden_size
    config.draft_vocab_size = drafter.lm_head.out_features
    config.base_embedding_norms = None  # padding changes the embedding rows that identify a base
    with torch.device("meta"):
        module: Any = RecurrentDrafter(config)
    padded: RecurrentDrafter = random_on(module, device, drafter.dtype, seed)
    assert padded.draft_ids is not None
    padded.draft_ids.copy_(torch.arange(config.draft_vocab_size) if drafter.draft_ids is None else drafter.draft_ids)

    # An embedding is zero where it was padded; so is h, unless it is fused from outputs of layers.
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
    if drafter.context is not None:
        _connect_context(padded, drafter)
    exit_parts = (2, d) if drafter.input_proj is None else (1, e)  # [h; s] itself, or a projection of it
    if drafter.input_proj is not None:
        assert padded.input_proj is not None
        _connect(padded.input_proj, drafter.input_proj, exit_parts, (2, d), silent=(0,) if h_silent else ())
    for index, (big, layer) in enumerate(zip(padded.layers, drafter.layers, strict=True)):
        reads_h = index == 0 and drafter.input_proj is None  # a layer's output is not zero where it was padded
        silent = (0,) if reads_h and h_silent else ()
        _connect(big.linear, layer.linear, exit_parts, exit_parts, silent)  # type: ignore[arg-type]
    head_parts = exit_parts
    if drafter.head_proj is not None:
        assert padded.head_proj is not None
        assert r is not None
        head_parts = (1, r)
        _connect(padded.head_proj, drafter.head_proj, head_parts, exit_parts)
    _connect(padded.lm_head, drafter.lm_head, (1, drafter.lm_head.out_features), head_parts)
    return padded


@torch.no_grad()
def pad_eagle(
    drafter: EagleDrafter, layers: int, shape: PadShape, *, device: str | torch.device, seed: int = 0
) -> EagleDrafter:
    """Pad an EAGLE-3 head for a model that was padded from `layers` layers: its logits are the same, over the same ids.

    Its own head dim stays. Where it normalises queries and keys, which are unpadded, with an epsilon that is scaled by
    d/D, the weights before are scaled by the root of d/D.

    Raises:
        ArgumentError: The head does not fit into the shape, has biases, or another width than its target.
    """
    config, (d, wide) = copy.deepcopy(drafter.config), (drafter.config.hidden_size, shape.hidden_size)
    if config.width != d or config.attention_bias or config.mlp_bias:
        raise ArgumentError("only an EAGLE-3 head of its target's width and without biases can be padded")
    shape = replace(shape, num_hidden_layers=1, head_dim=config.head_dim)
    names = [each.name for each in fields(PadShape) if each.name != "num_hidden_layers"]
    sizes = PadShape(num_hidden_layers=1, **{name: getattr(config, name) for name in names})
    check_fits(sizes, shape)
    for name in names:
        setattr(config, name, getattr(shape, name))
    config.width, config.rms_norm_eps = wide, config.rms_norm_eps * d / wide
    config.target_layers, config.draft_vocab_size = config.target_layers_of(layers), drafter.config.num_draft_ids
    config.base_embedding_norms = None  # as in `pad_drafter`
    with torch.device("meta"):
        module: Any = EagleDrafter(config)
    padded: EagleDrafter = random_on(module, device, drafter.dtype, seed)
    assert padded.draft_ids is not None
    padded.draft_ids.copy_(torch.arange(config.draft_vocab_size) if drafter.draft_ids is None else drafter.draft_ids)
    weights = dict[str, Tensor](drafter.named_parameters())
    for name, big in dict[str, Tensor](padded.named_parameters()).items():
        small, part = weights[name], name.split(".")[-2]
        if part in ("q_norm", "k_norm"):
            big.copy_(small)
        elif "norm" in name:
            big.view(-1, wide)[:, :d] = small.view(-1, d) * (d / wide) ** 0.5
        else:
            if part in ("fc", "o_proj", "down_proj", "embed_tokens"):
                big.zero_()
            if part in ("fc", "q_proj", "k_proj", "v_proj"):  # these read several vectors
                big, small = (x.unflatten(1, (-1, size)) for x, size in ((big, wide), (small, d)))
            if "self_attn" in name:
                big, small = by_head(big, name, shape), by_head(small, name, sizes)
            corner(big, small * (d / wide) ** 0.5 if config.qk_norm and part in ("q_proj", "k_proj") else small)
    return padded


def _connect_context(padded: RecurrentDrafter, drafter: RecurrentDrafter) -> None:
    """Write a drafter's context attention into a padded drafter.

    It normalises states and hidden states, so their added dims must be zero, as in an embedding. Their norm then scales
    them by the root of D/d. Queries and keys are normalised again, unpadded, with an epsilon that is scaled by d/D; so
    their weights are scaled by that root twice.
    """
    d, wide = drafter.config.hidden_size, padded.config.hidden_size
    if padded.fuse is not None:
        _silence(padded.fuse, d)
    if drafter.config.rnn and drafter.config.recurrence == "gated":
        _silence(padded.rnn_gate, wide + d)  # the gate of a zero state has no effect
    elif drafter.config.rnn:
        _silence(padded.rnn_w, d)
        _silence(padded.rnn_u, d)
    big, small = padded.context, drafter.context
    assert big is not None
    assert small is not None
    for large, layer, inputs, scale in (
        (big.query, small.query, 1, d / wide),
        (big.key, small.key, 2, d / wide),
        (big.value, small.value, 2, (d / wide) ** 0.5),
    ):
        _connect(large, layer, (1, layer.out_features), (inputs, d), silent=range(inputs))
        large.weight.unflatten(1, (inputs, wide))[..., :d] *= scale
    big.scale.copy_(small.scale)
    _connect(big.out, small.out, (1, d), (1, small.out.in_features))


def _silence(layer: nn.Linear, first: int) -> None:
    layer.weight[first:] = 0
    if layer.bias is not None:
        layer.bias[first:] = 0


def _connect(
    big: nn.Linear, small: nn.Linear, outs: tuple[int, int], ins: tuple[int, int], silent: Collection[int] = ()
) -> None:
    """Write a small layer's weights into a padded one, whose first outputs then depend on the small inputs only.

    Args:
        big: The padded layer, with random weights.
        small: The layer to write.
        outs: `(parts, size)` of the small output: `parts` vectors one after the other, each padded by itself.
        ins: The same of the small input.
        silent: Input parts whose padding is zero; the weights that read the padding stay random.
    """
    shape = (outs[0], big.out_features // outs[0], ins[0], big.in_features // ins[0])
    weight = big.weight.view(shape)  # [parts, M, parts, N]
    for part in set(range(ins[0])) - set(silent):
        weight[:, : outs[1], part, ins[1] :] = 0
    corner(weight, small.weight.view(*outs, *ins))
    if small.bias is not None:
        corner(big.bias.view(shape[:2]), small.bias.view(outs))
