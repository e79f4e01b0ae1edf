"""The models that a scheduler decodes with."""

from typing import Protocol

from redrafter.drafting.proposer import Proposer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.errors import UnsupportedError
from redrafter.model.target import Target


class Models(Protocol):
    """A target and what drafts for it; an engine is one."""

    @property
    def target(self) -> Target:
        """The model that verifies."""

    @property
    def draft_model(self) -> Target | None:
        """The model that drafts, or None."""

    @property
    def draft_vocabulary(self) -> VocabularyMap | None:
        """What that model has for each of the target's tokens; None where its ids are the target's."""

    @property
    def plain(self) -> Proposer:
        """The proposer that drafts nothing."""

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer for a batch of `rows` rows."""

    @property
    def rejection_sampling(self) -> bool:
        """Whether sampled drafts are kept by rejection sampling."""

    def draft_step_cost(self, rows: int) -> float | None:
        """Return the time of a step of `rows` rows with drafts, in steps without; None for no pauses.

        Drafting pauses if it gains less.
        """


def check_paged(models: Models) -> None:
    """Raise `UnsupportedError` if the models cannot run on a paged cache of one device."""
    target, draft_model = models.target, models.draft_model
    if draft_model is not None and draft_model.device != target.device:
        raise UnsupportedError(
            f"the draft model is on {draft_model.device} and the target on {target.device}; a server needs both on one "
            "device"
        )
    reason = target.paged.reason or (draft_model and draft_model.paged.reason)
    if reason:
        raise UnsupportedError(f"{target.name} cannot be served on a paged cache: {reason}")
