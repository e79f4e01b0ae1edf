"""Create untrained drafters for a base, with sizes derived from it unless options set them.

`FORMS` maps each form, such as a recurrent drafter or an EAGLE-3 head, to its functions.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from redrafter.app.flags import flag
from redrafter.drafting.dflash import DFlashDrafter
from redrafter.drafting.dflash_config import DFlashConfig
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DEFAULT_ROPE, AnyDrafterConfig, DrafterConfig, EagleConfig
from redrafter.drafting.drafter_types import make_drafter
from redrafter.drafting.eagle import EagleDrafter
from redrafter.drafting.text_drafters import TrainableDrafter, require
from redrafter.errors import ArgumentError
from redrafter.model.quantized_layers import QuantizedLinear
from redrafter.model.supported import config_width
from redrafter.model.target import context_of
from redrafter.train.config import TrainConfig
from redrafter.train.processes import gather_tensor

MAX_EXIT_DIM = 8192  # a residual layer of 16,384 would have 268M parameters
# Of block drafters: the ranks that DSpark and DFlash2 were published with, and DFlash2's convolutions and candidates.
MAX_TOKEN_RANK, CONV_TAPS, CONV_GROUP, CANDIDATES = 256, 2, 16, 16
SMALL_STD = 0.02  # of first weights of products with two factors, which learn nothing from zero
T = TypeVar("T")


class Form(NamedTuple):
    """The functions that create new drafters of one form."""

    # Returns the architecture for a number of ids; None for all.
    config: Callable[[PretrainedConfig, TrainConfig, int | None], AnyDrafterConfig]
    prepare: Callable[[Any, PreTrainedModel, Tensor | None], None]  # sets first weights; the ids are set after it


def new_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None = None) -> AnyDrafterConfig:
    """Create the config of a new drafter with `draft_vocab_size` ids; None for all of the base's."""
    return FORMS[config.form].config(base.get_text_config(decoder=True), config, draft_vocab_size)


def new_drafter(
    model: PreTrainedModel, config: TrainConfig, ids: Tensor | None = None, architecture: AnyDrafterConfig | None = None
) -> TrainableDrafter:
    """Create an untrained float32 drafter for a base, on the CPU.

    Args:
        model: The base.
        config: Options of the training: the form of the drafter, its sizes and the seed of its weights.
        ids: The base's ids in the drafter's vocabulary, `[V']` int64; None for all.
        architecture: An architecture of that form, with other sizes than options set; None to follow the options.
    """
    drafter_config = architecture or new_config(model.config, config, None if ids is None else len(ids))
    # The seed determines the weights without affecting the caller's random state.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(config.seed)
        drafter = require(make_drafter(drafter_config), "train").float()
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        FORMS[config.form].prepare(drafter, model, ids)
    if ids is not None:
        assert drafter.draft_ids is not None, "its config has draft_vocab_size"
        drafter.draft_ids.copy_(ids)
    return drafter


def _spread_layers(depth: int) -> tuple[int, ...]:
    """Return the layers at a quarter, a half and three quarters of `depth`.

    The last layer is excluded: its output is the last hidden state, which every drafter reads.
    """
    return tuple(sorted({depth * part // 4 for part in (1, 2, 3)} & set(range(depth - 1))))


def _depth(base: PretrainedConfig) -> int:
    return getattr(base, "num_hidden_layers", 0)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


# Recurrent drafters


def _recurrent_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None) -> DrafterConfig:
    """Return the architecture that options and base define.

    docs/benchmarks.md (Training) reports the gain of each part, measured at a hidden size of 512. Larger bases get
    fewer heads and a proportionally smaller head, since both are read at every draft step.
    """
    width, published = config_width(base), config.recurrence == "apple"
    # Capped, since the residual layers grow with the square of the width.
    exit_dim, kv_heads = min(2 * width, MAX_EXIT_DIM), max(width // 2048, 1)
    rank = min(max(width // 4, 512), 1024)
    # Limit the window to the rows' length: distances that never occur in training generalise badly.
    window = 0 if published else min(512, config.length or 512)
    return DrafterConfig(
        vocab_size=base.vocab_size,
        hidden_size=width,
        exit_dim=exit_dim,
        num_draft_layers=_given(config.num_layers, 2 if published else 3),
        recurrence=config.recurrence or "gated",
        target_layers=_given(config.target_layers, () if published else _spread_layers(_depth(base))),
        context_window=_given(config.context_window, window) or None,
        context_heads=kv_heads * max(width // (256 * kv_heads), 4),
        context_kv_heads=kv_heads,
        head_rank=_given(config.head_rank, 0 if published or rank >= exit_dim else rank) or None,
        draft_vocab_size=draft_vocab_size,
        draft_len_per_beam=config.draft_len,
    )


def _prepare_recurrent(drafter: RecurrentDrafter, model: PreTrainedModel, draft_ids: Tensor | None) -> None:
    for layer in drafter.layers:  # the residual layers start as the identity
        _set_to_zero(layer.linear)
    if drafter.fuse is not None:  # start with the last hidden state only
        _set_to_zero(drafter.fuse)
    if drafter.context is not None:  # start without context attention
        nn.init.zeros_(drafter.context.out.weight)
    # Embeddings are often far smaller than hidden states. Without scaled weights the drafter would learn slowly from
    # which token to continue.
    width, rms = drafter.config.hidden_size, _embedding_rms(model)
    if drafter.config.recurrence == "gated":
        drafter.rnn_gate.weight[:, :width] *= 1 / rms  # the columns that read the embedding
    else:
        nn.init.normal_(drafter.rnn_w.weight, std=1 / rms / width**0.5)


def _embedding_rms(model: PreTrainedModel) -> float:
    """Return the root mean square of some of a base's embeddings, which are often far smaller than hidden states."""
    ids = torch.arange(min(1024, model.config.get_text_config(decoder=True).vocab_size))
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids.to(model.device)).float()  # the module, which may scale them
        return float(embeddings.square().mean().sqrt().clamp(min=1e-6))


def _set_to_zero(linear: Any) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


# EAGLE-3 heads


def _eagle_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None) -> EagleConfig:
    """Return an architecture that reads the published layers, or a recurrent drafter's if the base has too few."""
    depth = _depth(base)
    published = 1, depth // 2 - 1, depth - 4
    ascend = list(published) == sorted(set(published))
    return EagleConfig(
        **_layer_sizes(base),
        target_layers=_given(config.target_layers, published if ascend else _spread_layers(depth) or (0,)),
        norm_before_residual=True,
        draft_vocab_size=draft_vocab_size,
        draft_len_per_beam=config.draft_len,
    )


def _layer_sizes(base: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a drafter whose decoder layers have the base's sizes, or defaults for unusual ones."""
    width = config_width(base)
    heads = _size(base, "num_attention_heads", max(width // 64, 1))
    kv_heads, head_dim = _size(base, "num_key_value_heads", heads), _size(base, "head_dim", 2 * (width // heads // 2))
    rope = getattr(base, "rope_parameters", None)
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return {
        "vocab_size": base.vocab_size,
        "hidden_size": width,
        "intermediate_size": _size(base, "intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": max(head_dim, 2),
        "rms_norm_eps": getattr(base, "rms_norm_eps", 1e-6),
        "rope": DEFAULT_ROPE | ({"rope_theta": theta} if isinstance(theta, float | int) else {}),
        "max_position_embeddings": context_of(base) or 2048,
    }


def _size(base: PretrainedConfig, name: str, default: int) -> int:
    value = getattr(base, name, None)
    return value if isinstance(value, int) and value > 0 else default


def _prepare_eagle(drafter: EagleDrafter, model: PreTrainedModel, draft_ids: Tensor | None) -> None:
    """Initialise a new head to pass the last layer's output to the base's head. Collective if the base is sharded."""
    width = drafter.config.width
    for product in (drafter.fc, drafter.midlayer.self_attn.o_proj, drafter.midlayer.mlp.down_proj):
        product.weight *= 0.1  # keep random outputs small compared with the residual
    # The drafter starts from the output of the highest layer that it reads.
    drafter.fc.weight[:, -width:] += torch.eye(width)
    _copy_end(drafter, model, draft_ids)


def _copy_end(drafter: EagleDrafter | DFlashDrafter, model: PreTrainedModel, draft_ids: Tensor | None) -> None:
    """Start from the base's final norm, and from its head if the drafter has one. Collective if the base is sharded."""
    width, product = drafter.config.width, model.get_output_embeddings()
    head = product.dequantize() if isinstance(product, QuantizedLinear) else gather_tensor(product.weight)
    norm = getattr(getattr(model.get_decoder(), "norm", None), "weight", None)  # the final norm, if it has this name
    if isinstance(norm, Tensor) and norm.shape == (width,):
        drafter.norm.weight.copy_(gather_tensor(norm))
    fits = head.shape == (drafter.config.vocab_size, width) and head.dtype.itemsize > 1  # others need their scales
    if drafter.lm_head is not None and fits:
        ids = slice(None) if draft_ids is None else draft_ids.to(head.device)
        drafter.lm_head.weight.copy_(head[ids])


# Drafters of blocks


def _blocks_config(base: PretrainedConfig, config: TrainConfig, draft_vocab_size: int | None) -> DFlashConfig:
    """Return the architecture of a drafter whose blocks hold `--draft-len` drafts, and whose head is the base's.

    With fewer ids than the base has, it has a head of its own.
    """
    depth = _depth(base)
    spread = sorted({max(layer, 0) for layer in (*(depth * part // 4 - 1 for part in (1, 2, 3)), depth - 2)})
    layers, target_layers = _given(config.num_layers, 3), _given(config.target_layers, tuple(spread))
    from_anchor, selects = config.form == "dspark", config.form == "dflash2"
    width = config_width(base)
    rank = min(max(width // 4, 1), MAX_TOKEN_RANK)
    if layers < 1 or not target_layers:
        name = "num_layers" if layers < 1 else "target_layers"
        raise ArgumentError(f"{flag(name)}: a drafter of --form {config.form} has at least one layer and reads one")
    return DFlashConfig(
        **_layer_sizes(base),
        num_layers=layers,
        block_size=config.draft_len + (not from_anchor),
        mask_token_id=base.vocab_size - 1,
        target_layers=target_layers,
        sample_from_anchor=from_anchor,
        own_head=draft_vocab_size is not None,
        draft_vocab_size=draft_vocab_size,
        markov_rank=rank if from_anchor else None,
        conv_kernel_size=CONV_TAPS if selects else None,
        conv_group_size=math.gcd(CONV_GROUP, width) if selects else None,
        selector_rank=rank if selects else None,
        selector_top_k=min(CANDIDATES, base.vocab_size) if selects else None,
        draft_len_per_beam=config.draft_len,
    )


def _prepare_blocks(drafter: DFlashDrafter, model: PreTrainedModel, draft_ids: Tensor | None) -> None:
    """Set small weights where two factors are multiplied, and choose the mask among ids that have an embedding."""
    _copy_end(drafter, model, draft_ids)
    for name, weight in drafter.named_parameters():
        if "kernel_projection" in name:  # the convolutions start as the identity
            nn.init.zeros_(weight)
        elif "codebook" in name or "markov_head" in name:
            nn.init.normal_(weight, std=SMALL_STD)
    last = drafter.config.vocab_size - 1
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    ids = [*([pad] if type(pad) is int and 0 <= pad <= last else []), last, 0]
    # A row of zeros, as some padding ids have, would make all masks look alike to the first layer.
    table: Any = model.get_input_embeddings()
    known = table(torch.tensor(ids, device=model.device)).any(dim=-1)
    drafter.config.mask_token_id = ids[int(known.int().argmax())]


_BLOCKS = Form(_blocks_config, _prepare_blocks)
FORMS = {
    "recurrent": Form(_recurrent_config, _prepare_recurrent),
    "eagle3": Form(_eagle_config, _prepare_eagle),
    **dict.fromkeys(("dflash", "dspark", "dflash2"), _BLOCKS),
}
