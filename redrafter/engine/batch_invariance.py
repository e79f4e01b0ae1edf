"""Engines whose texts do not depend on what is computed beside them."""

from collections.abc import Iterable

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.target.target import Target

__all__ = ["check_processors", "make_batch_invariant"]

# Hugging Face's processors that sum over the vocabulary in an order which, on a GPU, suits the number of rows.
_BY_ROWS = {
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "LogitNormalization": "renormalize_logits",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
}


def make_batch_invariant(target: Target, draft_model: Target | None, *, compile: bool) -> None:
    """Make the target of an engine batch-invariant, and let its draft model share its kind of cache.

    Args:
        target: The model whose text is wanted.
        draft_model: The model that drafts, or None. What it drafts changes no text, so it is computed as ever.
        compile: Whether the target is compiled for a GPU.

    Raises:
        ArgumentError: The target is on a GPU and not compiled.
        UnsupportedError: The target cannot be computed so, or the draft model not beside it.
    """
    if target.device.type == "cuda" and not compile:
        raise ArgumentError(
            "batch_invariant=True needs the compiled forward on a GPU: leave out compile=False (--no-compile)"
        )
    target.make_batch_invariant()
    if draft_model is None or draft_model is target:
        return
    if draft_model.device != target.device:
        raise UnsupportedError(
            f"batch_invariant=True needs both models on one device: the draft model is on {draft_model.device} and the "
            f"target on {target.device}"
        )
    if reason := draft_model.paged.reason:
        raise UnsupportedError(f"batch_invariant=True needs a draft model on a paged cache: {reason}")
    if draft_model.device.type == "cpu":
        draft_model.allow_varlen()


def check_processors(target: Target, processors: Iterable[object]) -> None:
    """Refuse logits processors by which a batch-invariant target would draw other tokens in another batch.

    Args:
        target: The model whose text is wanted.
        processors: Hugging Face's objects.

    Raises:
        UnsupportedError: There is such a processor; the message names its argument.
    """
    if not target.batch_invariant or target.device.type == "cpu":
        return
    for processor in processors:
        if argument := _BY_ROWS.get(type(processor).__name__):
            raise UnsupportedError(
                f"{argument} sums in an order that suits the number of rows, which batch_invariant=True rules out: use "
                "top_p, top_k or min_p"
            )
