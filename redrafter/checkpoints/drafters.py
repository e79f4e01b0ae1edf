"""Load a drafter, and check that it was made for a base."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from redrafter.checkpoints.merged import Defaults, defaults_file
from redrafter.drafting.drafter import DrafterConfig, RecurrentDrafter
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, UnsupportedError
from redrafter.files.checkpoint_kind import DRAFTER_FOLDER, SHAPE_FILE
from redrafter.target.target import Target

__all__ = ["check_beams", "check_fit", "check_match", "embedding_norms", "load_drafter", "past_training"]

NORM_ROWS = 8  # rows of the embedding table whose norms tell one base from another
NORM_TOLERANCE = 0.02  # relative: enough for half precision, far less than two bases differ


def load_drafter(
    model: str | Path | PreTrainedModel,
    drafter: str | Path | RecurrentDrafter | None,
    target: Target,
    revision: str | None = None,
) -> tuple[RecurrentDrafter, Defaults]:
    """The drafter for a target, on its device and in its dtype, and what a merged checkpoint asks for.

    Without `drafter`, `model` must name a merged checkpoint, which is then read at `revision`.
    """
    defaults = Defaults()
    if drafter is None:
        if not isinstance(model, str | Path):
            raise ArgumentError("a loaded model comes without a drafter: pass drafter=")
        file = defaults_file(str(model), revision)
        if file is None:
            raise CheckpointError(
                f"{model} has no {SHAPE_FILE}, so it holds no drafter: give one (--drafter D), draft with a smaller "
                "model (--draft-model D) or with the text itself (--prompt-lookup), or write plainly (--no-speculate)"
            )
        defaults = Defaults.read(file)
        drafter = RecurrentDrafter.from_pretrained(model, subfolder=DRAFTER_FOLDER, revision=revision)
    elif isinstance(drafter, str | Path):
        drafter = RecurrentDrafter.from_pretrained(drafter)
    assert isinstance(drafter, RecurrentDrafter)
    check_fit(drafter, target)
    module: Any = drafter
    return module.to(target.device, target.dtype).eval(), defaults


def embedding_norms(embedding: torch.nn.Embedding) -> list[float]:
    """Norms of a few evenly spaced rows of an embedding table: a base's fingerprint that survives a change of dtype."""
    weight = embedding.weight
    rows = torch.linspace(0, len(weight) - 1, NORM_ROWS, device=weight.device).long()
    return weight[rows].float().norm(dim=-1).tolist()


def check_fit(drafter: RecurrentDrafter, target: Target) -> None:
    """Raise `MismatchError`, with both values, when the drafter was made for another target."""
    name = f"{target.model.config._name_or_path or 'the target'} ({target.name})"
    width = target.embedding.weight.shape[-1]
    if width != target.hidden_size:
        raise UnsupportedError(
            f"{name} has embeddings of {width} and a head that reads {target.hidden_size}; a drafter needs one size of "
            "both, so use DraftTarget or PromptLookup"
        )
    check_match(drafter.config, target.hidden_size, target.vocab_size, [embedding_norms(target.embedding)], name)


def check_match(drafter: DrafterConfig, hidden: int, vocabulary: int, norms: list[list[float]], name: str) -> None:
    """The same of what is known of a base: its sizes, and the row norms of tables that may be its embedding."""
    made_for = f"its base is {drafter.base_model or 'not recorded'}"
    for what, mine, theirs in (
        ("hidden size", drafter.hidden_size, hidden),
        ("vocabulary", drafter.vocab_size, vocabulary),
    ):
        if mine != theirs:
            raise MismatchError(f"the drafter was made for a {what} of {mine}, but {name} has {theirs}; {made_for}")
    own = drafter.base_embedding_norms
    if own is None or not norms:
        return
    if not any(torch.allclose(torch.tensor(each), torch.tensor(own), rtol=NORM_TOLERANCE) for each in norms):
        raise MismatchError(
            f"the drafter was made for another base than {name}: the embedding's row norms are "
            f"{_short(norms[0])} instead of {_short(own)}; {made_for}"
        )


def check_beams(config: DrafterConfig, beams: int | None) -> None:
    """Raise `ArgumentError` when there are more beams than tokens to begin them with."""
    vocabulary = config.draft_vocab_size or config.vocab_size
    if beams is not None and beams > vocabulary:
        raise ArgumentError(f"num_beams={beams} is more than the drafter's vocabulary of {vocabulary} ids")


def past_training(config: DrafterConfig, depth: int | None) -> str | None:
    """Return what to say of drafts that are longer than those the drafter was trained for; None where they are not."""
    if depth is None or config.trained_draft_len is None or depth <= config.trained_draft_len:
        return None
    return (
        f"draft_len_per_beam={depth} is more than the {config.trained_draft_len} steps that the drafter was trained "
        "for; the further ones will seldom be accepted"
    )


def _short(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values[:3]) + ", ...]"
