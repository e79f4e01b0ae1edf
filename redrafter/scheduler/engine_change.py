"""Changes that an operator makes to a running engine between two steps, one object for each kind.

A change is checked when it is made, in any thread while sequences run, so that a refused change does not affect them.
It is applied when no step is in flight. Running sequences are put back before it, and continue after it with the tokens
that they have: a sequence is never read by one set of weights and continued by another.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence


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
