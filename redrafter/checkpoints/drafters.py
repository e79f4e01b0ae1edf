"""Load drafters, and check that they were trained for the target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from redrafter.checkpoints.merged import Defaults, find_file
from redrafter.checkpoints.models import config_to_load
from redrafter.checkpoints.mtp import holds_mtp, load_mtp
from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.drafting.drafter_model import DrafterModel, check_draft_ids
from redrafter.drafting.drafter_types import open_drafter_model
from redrafter.drafting.recycled import RecycledConfig, RecycledTokens
from redrafter.errors import ArgumentError, MismatchError, UnsupportedError, warn
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE, check_config, wrong_kind_error
from redrafter.model.options import SCHEMES
from redrafter.model.quantized_layers import quantize_linears
from redrafter.model.supported import config_width
from redrafter.model.target import Target
from redrafter.model.weights import hold_in_memory

NORM_ROWS = 8  # rows of the embedding table whose norms distinguish bases
EMBEDDING_ROWS = 64  # rows by which a drafter's own embedding table is compared with the base's
# Least mean cosine of tables that were trained from the base's; those of two random tables have 0.00 to 0.02.
TRAINED_SIMILARITY = 0.5
NORM_TOLERANCE = 0.02  # relative: enough for half precision, far less than two bases differ


def load_drafter(
    model: str | Path | PreTrainedModel,
    drafter: DrafterModel | None,
    target: Target,
    revision: str | None = None,
    quantization: str | None = None,
    base_embedding: bool = False,
) -> tuple[DrafterModel, Defaults]:
    """Place the drafter of a target on the target's device, in the target's dtype.

    Args:
        model: Source of the target.
        drafter: The drafter; None for the one inside the target's checkpoint, or else a table of recycled tokens.
        target: The target to draft for.
        revision: Revision of the merged checkpoint on the hub.
        quantization: One of `SCHEMES`, or None for the stored weights.
        base_embedding: Whether to use the target's embedding table instead of the drafter's own.

    Returns:
        The drafter in evaluation mode, and the merged checkpoint's defaults, which are empty for a separate drafter.
    """
    defaults = Defaults()
    if drafter is None and isinstance(model, str | Path):
        file = find_file(str(model), SHAPE_FILE, revision)
        if file is not None:
            defaults = Defaults.from_file(file)
            drafter = open_drafter_model(model, subfolder=DRAFTER_FOLDER, revision=revision)
        else:
            drafter = load_mtp(str(model), target, revision)
    if drafter is None:
        drafter = new_table(target)
    check_fits_target(drafter, target)
    if base_embedding:
        drafter.share_embedding()
    elif message := foreign_embedding_warning(drafter, target):
        warn(message)
    module = drafter.placed(target)
    hold_in_memory(module)  # an MTP layer is read from the files of its base
    if quantization is not None:
        if isinstance(drafter, RecycledTokens):
            raise ArgumentError("draft_quantization is for a drafter, and this table has no weights: leave it out")
        if quantization not in SCHEMES:
            raise ArgumentError(f"draft_quantization of a drafter must be one of {', '.join(SCHEMES)}, or None")
        quantize_linears(module, quantization, keep=(module.unquantized,))
    return module, defaults


def new_table(target: Target) -> RecycledTokens:
    """Return an empty table of the tokens that a target finds likely, which drafts without training."""
    most = min(target.vocab_size, RecycledConfig.candidates)
    config = RecycledConfig(
        draft_beams=min(most, RecycledConfig.draft_beams),
        candidates=most,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        base_model=target.model.config.name_or_path or target.name,
        base_embedding_norms=embedding_norms(target.embedding.weight),
    )
    return RecycledTokens(config)


def check_pair(model: str | Path | PreTrainedModel, drafter: DrafterModel | None, load: Mapping[str, Any]) -> None:
    """Check what the configs of a target that is not loaded and of its drafter say, before weights are read.

    Args:
        model: Source of the target; a loaded one is not checked here.
        drafter: The drafter; None for the one inside the target's checkpoint.
        load: The arguments that the target is to be loaded with.

    Raises:
        CheckpointError: The target's checkpoint has no config that can be read, or is of another kind.
        MismatchError: The drafter was made for a target of another size.
    """
    if not isinstance(model, str | Path):
        return
    if drafter is None:
        check_config(Path(model))
        if Path(model).exists() and not holds_drafter(str(model)) and (error := wrong_kind_error(Path(model), "model")):
            raise error
        return
    config = config_to_load(model, load).get_text_config(decoder=True)
    if hasattr(config, "hidden_size") and hasattr(config, "vocab_size"):
        check_fits_base(drafter.config, config_width(config), config.vocab_size, [], str(model))


def holds_drafter(name: str) -> bool:
    """Return whether the checkpoint in a directory or repository holds a drafter: one of ours, or an MTP layer.

    Raises `OSError` if the hub cannot be asked.
    """
    return find_file(name, SHAPE_FILE) is not None or holds_mtp(name)


def embedding_norms(weight: torch.Tensor) -> list[float]:
    """Return the norms of `NORM_ROWS` rows of an embedding table `[V, D]`, which identify a base in any dtype."""
    # A narrower default dtype of the caller's would round row numbers past the end of the table.
    rows = torch.linspace(0, len(weight) - 1, NORM_ROWS, device=weight.device, dtype=torch.float32).long()
    return weight[rows].float().norm(dim=-1).tolist()


def foreign_embedding_warning(drafter: DrafterModel, target: Target) -> str | None:
    """Return a warning for a drafter whose own embedding table does not resemble the target's, else None.

    Heads are published with tables that were never trained. The text is right with them, and hardly any draft is.
    """
    own, table = drafter.embed_tokens, target.embedding.weight
    if own is None or own.weight.shape != table.shape:
        return None
    rows = torch.linspace(0, len(table) - 1, EMBEDDING_ROWS, dtype=torch.float32).long()
    drafters, targets = (weight[rows.to(weight.device)].float().cpu() for weight in (own.weight, table))
    similarity = cosine_similarity(drafters, targets, dim=-1).mean().item()
    if similarity >= TRAINED_SIMILARITY:
        return None
    return (
        f"the drafter's embedding table is not its base's (mean cosine of rows {similarity:.2f}), which hardly any "
        "drafter is trained with: unless this one was, base_embedding=True (--base-embedding) drafts with the base's"
    )


def check_fits_target(drafter: DrafterModel, target: Target) -> None:
    """Raise unless a drafter has the sizes and the embedding norms of a target, and ids that it can draft.

    Raises:
        MismatchError: It was made for another target.
        CheckpointError: `check_draft_ids` rejects its ids, or `check_entries` those of a table.
    """
    config = drafter.config
    check_draft_ids(drafter.draft_ids, config.draft_vocab_size, config.vocab_size, "the drafter")
    name = f"{target.model.config.name_or_path or 'the target'} ({target.name})"
    embedding_size = target.embedding.weight.shape[-1]
    if isinstance(drafter, RecycledTokens):
        drafter.check_entries()
    elif embedding_size != target.hidden_size:
        raise UnsupportedError(
            f"{name} has embeddings of {embedding_size} and a head that reads {target.hidden_size}; a drafter needs "
            "one size of both, so use DraftTarget or PromptLookup"
        )
    check_fits_base(config, target.hidden_size, target.vocab_size, [embedding_norms(target.embedding.weight)], name)


def check_fits_base(drafter: AnyDrafterConfig, hidden: int, vocab: int, norms: list[list[float]], name: str) -> None:
    """Raise `MismatchError` unless a drafter has the sizes and the embedding norms of a base that need not be loaded.

    `norms` belong to each tensor that may be the base's embedding table; where there are none, or the drafter
    records none, they are not compared.
    """
    made_for = f"its base is {drafter.base_model or 'not recorded'}"
    for what, recorded, actual in (
        ("hidden size", drafter.hidden_size, hidden),
        ("vocabulary", drafter.vocab_size, vocab),
    ):
        if recorded != actual:
            raise MismatchError(f"the drafter was made for a {what} of {recorded}, but {name} has {actual}; {made_for}")
    recorded_norms = drafter.base_embedding_norms
    if recorded_norms is None or not norms:
        return
    expected = torch.tensor(recorded_norms)
    # Norms distinguish bases of equal size; a tolerance, since the base may be in another dtype.
    if not any(torch.allclose(torch.tensor(candidate), expected, rtol=NORM_TOLERANCE) for candidate in norms):
        first = ((f"{value:.3g}" for value in values[:3]) for values in (norms[0], recorded_norms))
        shown = [f"[{', '.join(values)}, ...]" for values in first]
        raise MismatchError(
            f"the drafter was made for another base than {name}: the embedding's row norms are "
            f"{shown[0]} instead of {shown[1]}; {made_for}"
        )


def check_beams(config: AnyDrafterConfig, beams: int | None) -> None:
    """Raise `ArgumentError` if there are more beams than tokens: each beam begins with another one."""
    vocabulary = config.num_draft_ids
    if beams is not None and beams > vocabulary:
        raise ArgumentError(f"num_beams={beams} is more than the drafter's vocabulary of {vocabulary} ids")


def draft_length_warning(config: AnyDrafterConfig, depth: int | None) -> str | None:
    """Return a warning for drafts of more tokens than the drafter is known to have been trained or measured for."""
    if depth is None or not config.trained_draft_len:
        return None
    if depth <= max(config.trained_draft_len, config.draft_len_per_beam):  # the latter is what a training measured
        return None
    return (
        f"draft_len_per_beam={depth} is more than the {config.trained_draft_len} steps that the drafter was trained "
        f"for; `redrafter evaluate --shapes 5x{config.trained_draft_len},5x{depth}` says whether the further ones pay"
    )
