"""Whether a model can be decoded in some way, and why not."""

from dataclasses import dataclass

__all__ = ["Support"]


@dataclass(frozen=True)
class Support:
    """Whether a model can be decoded in some way, and why not.

    Attributes:
        reason: Why it cannot, as the end of a sentence; None when it can.
    """

    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the model can be decoded in that way."""
        return self.reason is None
