"""Engines whose texts do not depend on what is computed beside them."""

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.target.target import Target

__all__ = ["make_batch_invariant"]


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
