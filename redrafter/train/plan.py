"""What a training would be, said before it is begun: from the base's config and the data, without its weights."""

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from redrafter.data.windows import Windows
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.errors import CheckpointError, first_line
from redrafter.files.checkpoint_kind import load_error
from redrafter.target.target import context_of
from redrafter.train.config import LENGTH, TrainConfig
from redrafter.train.head_loss import chunk_anchors
from redrafter.train.init_drafter import new_config

__all__ = ["last_step", "outline", "plan", "row_length"]

ALIVE = 5  # float32 copies of a chunk's logits: they, both log-probabilities, both probabilities


def plan(config: TrainConfig, windows: Windows, processes: int) -> list[str]:
    """Lines for a person. Raises `CheckpointError` and `ArgumentError` for a base and options that cannot be used."""
    base, drafter = outline(config)
    told = base.config.get_text_config(decoder=True)
    windows.check(told.vocab_size, context_of(told))
    own, whole = drafter.num_parameters(), base.num_parameters()
    per_epoch, steps = windows.steps_per_epoch(config.batch_size, processes), last_step(config, windows, processes)
    row = int(windows.row_widths.max())
    most = config.batch_size * config.accumulate * processes * row
    kept = int(windows.mask.sum())
    return [
        f"base: {type(base).__name__}, {whole:,} parameters, {str(base.dtype).removeprefix('torch.')}, frozen",
        f"drafter: {own:,} trainable parameters, {100 * own / whole:.1f} % of the base's",
        *_memory(config, base, drafter, row, processes),
        f"data: {len(windows):,} windows, {len(windows.tokens):,} tokens, {kept:,} of them learnt, in "
        f"{len(windows.row_widths):,} rows of at most {row} tokens",
        f"an optimizer step: {config.accumulate} x {config.batch_size} rows on each of {processes} "
        f"process{'es' if processes > 1 else ''}, at most {most:,} tokens",
        f"an epoch: {math.ceil(per_epoch / config.accumulate):,} steps",
        f"in all: {f'{steps:,} steps, at most {steps * most:,} tokens' if steps else 'as many steps as there is time'}"
        + (f"; at most {config.minutes:g} minutes" if config.minutes else ""),
    ]


def last_step(config: TrainConfig, windows: Windows, processes: int) -> int | None:
    """The step at which steps and epochs end it; one epoch when nothing says when to end. None: only time does."""
    if config.epochs is None and (config.steps or config.minutes):
        return config.steps
    batches = (config.epochs or 1) * windows.steps_per_epoch(config.batch_size, processes)
    by_epochs = math.ceil(batches / config.accumulate)
    return min(by_epochs, config.steps or by_epochs)


def outline(config: TrainConfig) -> tuple[PreTrainedModel, RecurrentDrafter]:
    """The base and the drafter without their weights."""
    base_config = _base(config)
    try:
        with torch.device("meta"):
            base: Any = AutoModelForCausalLM.from_config(
                base_config,
                trust_remote_code=config.trust_remote_code,
                dtype=_dtype(config, base_config),
            )
    except Exception as error:  # as many kinds as there are models
        raise CheckpointError(f"cannot load a model from {config.model}: {first_line(error)}") from error
    with torch.device("meta"):
        return base, RecurrentDrafter(_drafter_config(config, base_config)).float()


def row_length(config: TrainConfig) -> int:
    """Tokens in a row of a batch."""
    if config.length is not None:
        return config.length
    context = context_of(_base(config).get_text_config(decoder=True))
    return LENGTH if context is None else min(LENGTH, context)


def _base(config: TrainConfig) -> PretrainedConfig:
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            str(config.model), trust_remote_code=config.trust_remote_code
        )
        return found
    except Exception as error:  # as many kinds as there are models
        raise load_error("model", str(config.model), error) from error


def _drafter_config(config: TrainConfig, base: PretrainedConfig) -> DrafterConfig:
    if config.drafter is None:
        return new_config(base, config, config.draft_vocab_size)
    try:
        return DrafterConfig.from_pretrained(config.drafter)
    except Exception as error:
        raise load_error("drafter", config.drafter, error) from error


def _dtype(config: TrainConfig, base: PretrainedConfig) -> torch.dtype:
    saved: Any = base.get_text_config(decoder=True).dtype or base.dtype or torch.float32
    found: torch.dtype = saved if config.dtype == "auto" else getattr(torch, config.dtype)
    return found


def _memory(
    config: TrainConfig, base: PreTrainedModel, drafter: RecurrentDrafter, row: int, processes: int
) -> list[str]:
    """On each process's device. What a batch takes is counted by its largest parts only."""
    own, size = drafter.num_parameters(), base.dtype.itemsize
    told, vocabulary = drafter.config, drafter.lm_head.out_features
    places = config.batch_size * row
    device = torch.device("cpu" if config.cpu or not torch.cuda.is_available() else "cuda")
    most = config.chunk or config.draft_len * chunk_anchors(vocabulary, config.draft_len, device)
    chunk = 4 * vocabulary * min(most, config.draft_len * places)
    reduced = vocabulary if told.draft_vocab_size is not None else 0
    states = 4 * places * config.draft_len * told.exit_dim * (2 + told.num_draft_layers)
    parts = {
        "base": base.num_parameters() * size / (processes if config.shard_base else 1),
        "drafter's weights": 4 * own,
        "their gradients": 4 * own,
        "AdamW's state": 8 * own,
        "the base's logits": places * (told.vocab_size + reduced) * size,
        "the drafter's states": states,
        "a chunk's logits": ALIVE * chunk,
    }
    shown = ", ".join(f"{what} {_size(count)}" for what, count in parts.items())
    return [f"memory on each device, about: {_size(sum(parts.values()))} ({shown})"]


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
