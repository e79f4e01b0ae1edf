"""An engine as its scheduler sees it: its models, and the changes that an operator makes to them between two steps.

A change is checked when it is made, in any thread while sequences run, so that a refused change does not affect them.
It is applied when no step is in flight. Running sequences are put back before it, and continue after it with the tokens
that they have: a sequence is never read by one set of weights and continued by another.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from redrafter.drafting.policy import DraftPolicy
from redrafter.drafting.proposer import Proposer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.model.forward_batch import LogitsReader
from redrafter.model.target import Target
from redrafter.scheduler.paged_memory import PagedMemory


class Models(Protocol):
    """A target with its proposer. Engines implement this protocol.

    Attributes:
        target: The model that verifies.
        draft_model: The model that drafts, or None.
        draft_vocabulary: Map from the target's tokens to the draft model's; None if their ids are equal.
        undrafted: The proposer that drafts nothing.
        rejection_sampling: Whether sampled drafts are accepted by rejection sampling.
    """

    target: Target
    draft_model: Target | None
    draft_vocabulary: VocabularyMap | None
    undrafted: Proposer
    rejection_sampling: bool

    @property
    def logits_reader(self) -> LogitsReader | None:
        """Return the reader that stores the logits of each step for later drafts; None where drafts read none."""

    def draft_policy(self, sizes: Sequence[int], memory: PagedMemory | None) -> DraftPolicy:
        """Return the policy that chooses the drafts of steps of these batch sizes."""


class EngineChange(ABC):
    """A change of an engine that has passed its checks.

    Attributes:
        not_finite: Names of the tensors that it writes with NaN or infinite numbers.
    """

    not_finite: Sequence[str] = ()

    @abstractmethod
    def apply(self) -> None:
        """Make the change, while no forward runs and no sequence holds blocks, and count it in the models' `revision`.

        Raises:
            ReDrafterError: It cannot be made now; nothing has changed then.
        """
