"""Changes that an operator makes to a running engine between two steps, one object for each kind.

A change is checked when it is made, in any thread while sequences run, so that one that is refused costs them
nothing. It is applied when no step is in flight. Running sequences are put back before, and continue after it
with the tokens that they have: a sequence is never read by one set of weights and continued by another.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from redrafter.scheduler.paged_memory import PagedMemory


class EngineChange(ABC):
    """A change of an engine that was found possible.

    Attributes:
        forgets: Whether keys and values that are stored would be others after it.
        asleep: Whether nothing can be computed after it.
        same_models: Whether the target and its proposer are the same after it, so that statistics of how
            drafts are accepted holds.
        not_finite: Names of tensors that it writes in which numbers are NaN or infinite.
    """

    forgets = True
    asleep = False
    same_models = False
    not_finite: Sequence[str] = ()

    @abstractmethod
    def apply(self, memory: PagedMemory | None) -> bool:
        """Make the change, while no forward runs and no sequence holds blocks.

        Args:
            memory: The paged memory of the engine; None where it has none.

        Returns:
            Whether steps that were captured before are out of date.

        Raises:
            ReDrafterError: It cannot be made now; nothing has changed then.
        """
