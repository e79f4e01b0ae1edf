"""Resolve the options of a training from its base, load its texts, and describe it, for `--dry-run` too.

The plan needs the base's config and the data, but no weights.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from redrafter.checkpoints.models import load_config
from redrafter.data.documents import encode_documents, format_sample
from redrafter.data.prompts import sample_prompts
from redrafter.data.rows import Row, read_rows
from redrafter.data.windows import Windows
from redrafter.drafting.drafter_config import DrafterConfig
from redrafter.drafting.drafter_types import drafter_class, make_drafter
from redrafter.drafting.low_rank import LowRankDrafter
from redrafter.drafting.text_drafters import TrainableDrafter, require
from redrafter.errors import ArgumentError, CheckpointError, first_line
from redrafter.files.checkpoint_kind import load_error
from redrafter.files.dtype_names import dtype_name
from redrafter.model.target import context_of
from redrafter.train.config import DEFAULT_LENGTH, RECIPES, SMALL_BASE, TrainConfig
from redrafter.train.init_drafter import new_config
from redrafter.train.loss import chunk_anchors
from redrafter.train.optimizer import hidden_matrices

# The fraction of a held-out text used as prompt, and the maximum number of its tokens.
VALIDATION_PROMPT_SHARE, MAX_VALIDATION_PROMPT_TOKENS = 0.5, 64
FEW_STEPS = 500  # optimizer steps that a new drafter needs at least to be worth measuring
LARGE_SHARE = 0.5  # of the base's parameters; a larger drafter costs too much compared with a step of the base
LOGIT_COPIES = 5  # float32 tensors of a chunk: logits, two log-probabilities, two probabilities


def describe_plan(config: TrainConfig, windows: Windows, processes: int) -> list[str]:
    """Describe base, drafter, memory and data of a training, one line each.

    `processes` is the number of processes that would train together.

    Raises:
        CheckpointError: The base's config cannot be read.
        ArgumentError: The options do not suit the base.
        MismatchError: The data contain ids outside the base's vocabulary.
    """
    base, drafter = build_without_weights(config)
    text_config = base.config.get_text_config(decoder=True)
    windows.check(text_config.vocab_size, context_of(text_config))
    drafter_size, base_size = drafter.num_parameters(), base.num_parameters()
    trained = trained_parameters(drafter, config)
    per_epoch, steps = windows.steps_per_epoch(config.batch_size, processes), last_step(config, windows, processes)
    row = int(windows.row_widths.max())
    step_tokens = config.batch_size * config.accumulate * processes * row
    learnt = int(windows.mask.sum())
    total = f"{steps:,} steps, at most {steps * step_tokens:,} tokens" if steps else "as many steps as there is time"
    return [
        f"base: {type(base).__name__}, {base_size:,} parameters, {dtype_name(base.dtype)}, frozen",
        f"drafter: {trained:,} trainable parameters{'' if trained == drafter_size else f' of {drafter_size:,}'}, "
        f"{100 * drafter_size / base_size:.1f} % of the base's",
        *describe_recipe(config, base, drafter),
        *_memory(config, base, drafter, trained, row, processes),
        f"data: {len(windows):,} windows, {len(windows.tokens):,} tokens, {learnt:,} of them learnt, in "
        f"{len(windows.row_widths):,} rows of at most {row} tokens",
        f"an optimizer step: {config.accumulate} x {config.batch_size} rows on each of {processes} "
        f"process{'es' if processes > 1 else ''}, at most {step_tokens:,} tokens",
        f"an epoch: {math.ceil(per_epoch / config.accumulate):,} steps",
        f"in all: {total}" + (f"; at most {config.minutes:g} minutes" if config.minutes else ""),
        *notes(config, base, drafter, windows, steps),
    ]


def describe_recipe(config: TrainConfig, base: PreTrainedModel, drafter: TrainableDrafter) -> list[str]:
    """Return lines with the form of a new recurrent drafter, its recipe, and the recipe's measurements.

    Without a recipe the line names the one that suits the base's size.
    """
    form = drafter.config
    if config.drafter is not None or not isinstance(form, DrafterConfig):
        return []
    rank = f"rank {form.head_rank:,}" if form.head_rank else "full rank"
    layers = f"{form.num_draft_layers} residual layers of width {form.exit_dim:,}"
    made = f"{layers}, a head of {rank} over {form.num_draft_ids:,} ids"
    if config.recipe is not None:
        recipe = RECIPES[config.recipe]
        return [f"recipe {config.recipe}, for {recipe.suits}: {made}", f"measured with its values: {recipe.measured}"]
    suits = "small" if base.num_parameters() < SMALL_BASE else "large"
    hint = f"; --recipe {suits} is for {RECIPES[suits].suits}" if form.recurrence == "gated" else ""
    return [f"recipe none: {made}{hint}"]


def notes(
    config: TrainConfig, base: PreTrainedModel, drafter: TrainableDrafter, windows: Windows, steps: int | None
) -> list[str]:
    """Return a line for tokens that are not learnt, and for each option that makes a new drafter of little use.

    `steps` is the length of the training.
    """
    lines, length = list[str](), config.length or 0
    window = drafter.config.context_window or 0 if isinstance(drafter.config, DrafterConfig) else 0
    if config.drafter is None and window > length:
        lines.append(
            f"note: --context-window {window} reaches further back than rows of --length {length}, and is read badly "
            f"there in longer texts: give --length {window}, or --context-window {length}"
        )
    if missed := windows.missed:
        total = missed + int(windows.mask.sum())
        lines.append(f"note: {missed:,} of {total:,} tokens to learn are in no window; {_longer(config, windows)}")
    if config.drafter is None and steps is not None and steps < FEW_STEPS and not config.minutes:
        lines.append(f"note: {steps:,} steps are few for a new drafter: give more rows, --epochs or a smaller --length")
    share = drafter.num_parameters() / base.num_parameters()
    if config.drafter is None and share >= LARGE_SHARE:
        lines.append(
            f"note: the drafter is {share:.0%} as large as the base, so drafts cost much of what they save: give a "
            f"smaller --draft-vocab-size (its head knows {drafter.config.num_draft_ids:,} ids)"
        )
    return lines


def _longer(config: TrainConfig, windows: Windows) -> str:
    """Say which `--length` holds all tokens to learn, of which windows of the current length hold some or none."""
    return f"texts are cut at --length {config.length}: give --length {windows.longest_cut}, or shorter rows"


def last_step(config: TrainConfig, windows: Windows, processes: int) -> int | None:
    """Return the optimizer step at which `--steps` or `--epochs` ends a training; None if only `--minutes` does.

    Without any of these options it is the end of the first epoch.
    """
    if config.epochs is None and (config.steps or config.minutes):
        return config.steps
    batches = (config.epochs or 1) * windows.steps_per_epoch(config.batch_size, processes)
    by_epochs = math.ceil(batches / config.accumulate)
    return min(by_epochs, config.steps or by_epochs)


def build_without_weights(config: TrainConfig) -> tuple[PreTrainedModel, TrainableDrafter]:
    """Build the base and the drafter on the meta device, without memory for weights."""
    base_config = load_config(str(config.model), trust_remote_code=config.trust_remote_code)
    saved: Any = base_config.get_text_config(decoder=True).dtype or base_config.dtype or torch.float32
    dtype = saved if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        # Parameters on the meta device have shapes but take no memory.
        with torch.device("meta"):
            how = {"trust_remote_code": config.trust_remote_code, "dtype": dtype}
            base: Any = AutoModelForCausalLM.from_config(base_config, **how)
    except Exception as error:  # each model class raises its own types
        raise CheckpointError(f"cannot load a model from {config.model}: {first_line(error)}") from error
    if config.drafter is None:
        form = new_config(base_config, config, config.draft_vocab_size)
    else:
        try:
            form = drafter_class(config.drafter).config_class.from_pretrained(config.drafter)
        except Exception as error:
            raise load_error("drafter", config.drafter, error) from error
    with torch.device("meta"):
        drafter = require(make_drafter(form), "train").float()
    drafter.check_unroll(config.draft_len)
    return base, drafter


def resolve_options(config: TrainConfig) -> TrainConfig:
    """Return a config with `length` and `draft_vocab_size` as the base has them.

    `draft_vocab_size` becomes None, for all ids, where a recipe's value is no fewer than the base has.
    """
    base = load_config(str(config.model), trust_remote_code=config.trust_remote_code).get_text_config(decoder=True)
    length, ids = config.length or min(DEFAULT_LENGTH, context_of(base) or DEFAULT_LENGTH), config.draft_vocab_size
    of_recipe = config.recipe is not None and ids == RECIPES[config.recipe].options.get("draft_vocab_size")
    if of_recipe and ids is not None and ids >= base.vocab_size:
        ids = None
    return replace(config, length=length, draft_vocab_size=ids)


def _memory(
    config: TrainConfig, base: PreTrainedModel, drafter: TrainableDrafter, trained: int, row: int, processes: int
) -> list[str]:
    """Estimate the memory on each process's device; of a batch, only the largest parts are counted."""
    drafter_size, item_bytes = drafter.num_parameters(), base.dtype.itemsize
    drafter_config, vocabulary = drafter.config, drafter.config.num_draft_ids
    positions = config.batch_size * row
    device = torch.device("cpu" if config.cpu or not torch.cuda.is_available() else "cuda")
    predictions = config.draft_len * chunk_anchors(vocabulary, config.draft_len, device)
    chunk = 4 * vocabulary * min(predictions, config.draft_len * positions)
    # Selecting a part of the vocabulary copies the base's logits.
    reduced = vocabulary if drafter_config.draft_vocab_size is not None else 0
    muon = 0
    if config.optimizer == "muon":  # all low-rank updates are hidden matrices
        muon = trained if config.lora_rank else sum(weight.numel() for weight in hidden_matrices(drafter))
    parts = {
        "base": base.num_parameters() * item_bytes / (processes if config.shard_base else 1),
        "drafter's weights": 4 * drafter_size,
        "their gradients": 4 * trained,
        # Two FP32 moments per parameter with AdamW, one with Muon.
        "AdamW's state": 8 * (trained - muon),
        **({"Muon's state": 4 * muon} if muon else {}),
        "the base's logits": positions * (drafter_config.vocab_size + reduced) * item_bytes,
        **drafter.unroll_bytes(config.batch_size, row, config.draft_len),
        "a chunk's logits": LOGIT_COPIES * chunk,
    }
    shown = ", ".join(f"{name} {_format_bytes(count)}" for name, count in parts.items())
    return [f"memory on each device, about: {_format_bytes(sum(parts.values()))} ({shown})"]


def trained_parameters(drafter: TrainableDrafter, config: TrainConfig) -> int:
    """Return the number of trained parameters: all weights of a drafter, or only its low-rank updates."""
    if config.lora_rank is None:
        return drafter.num_parameters()
    with torch.device("meta"):  # the count depends on shapes only
        form = make_drafter(drafter.config)
    return LowRankDrafter(form, config.lora_rank).trained_parameters


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


# The data


def load_windows(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Load and tokenize the training rows. Raises `CheckpointError` if there are none or one cannot be read."""
    documents = encode_documents(_training_rows(config), tokenizer, end_ids(config))
    windows = Windows(documents, config.length or DEFAULT_LENGTH, tokenizer.bos_token_id, config.pack)
    if not len(windows) and windows.missed:
        raise CheckpointError(
            f"{', '.join(config.data)}: none of the {windows.missed:,} tokens to learn is in a window, which needs two "
            f"in a row after a first token; {_longer(config, windows)}"
        )
    if not len(windows):
        raise _no_rows(config)
    return windows


def end_ids(config: TrainConfig) -> frozenset[int]:
    """Return the ids that end an answer of the base, from its generation config; none where it has no such file."""
    try:
        ends = GenerationConfig.from_pretrained(str(config.model)).eos_token_id
    except (OSError, ValueError):
        return frozenset()
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if end is not None)


def show_first_document(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first training text with its trained parts marked. Raises `CheckpointError` if there is none."""
    document = next(encode_documents(_training_rows(config), tokenizer, end_ids(config)), None)
    if document is None:
        raise _no_rows(config)
    return format_sample(document, tokenizer)


def validation_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[list[int]]:
    """Choose the prompts that the base continues for validation, ids of each.

    `context` is the number of tokens of the base's context; None for no limit. Raises `ArgumentError` if options
    request a validation and no prompt is left.
    """
    rows = read_rows([config.validate] if config.validate else config.data)
    held_out = [row for row in rows if row.split == "val" or (config.validate and row.split != "train")]
    max_tokens = config.length or DEFAULT_LENGTH
    if context is not None:  # one token of context must remain for the continuation
        max_tokens = min(max_tokens, context - 1)
    cut: dict[str, Any] = {"text_share": VALIDATION_PROMPT_SHARE, "max_text_tokens": MAX_VALIDATION_PROMPT_TOKENS}
    chosen = sample_prompts(held_out, tokenizer, config.validate_prompts, max_tokens, config.seed, **cut)
    if not chosen and (config.validate or config.validate_every):
        raise ArgumentError(
            f"{config.validate or ', '.join(config.data)}: no prompt of 1 to {max_tokens} tokens to validate on; give "
            "--validate other rows and --validate-prompts more than 0, or leave these and --validate-every out"
        )
    return chosen


def _training_rows(config: TrainConfig) -> Iterator[Row]:
    return (row for row in read_rows(config.data) if row.split in (None, "train"))


def _no_rows(config: TrainConfig) -> CheckpointError:
    return CheckpointError(f"{', '.join(config.data)}: no row to train on; rows of split val and test are not")
