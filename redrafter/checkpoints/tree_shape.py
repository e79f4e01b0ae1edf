"""Shape of the tree that a drafter is searched for."""

from dataclasses import asdict, dataclass, fields

from redrafter.tree.token_tree import check_size

__all__ = ["TreeShape"]


@dataclass(frozen=True)
class TreeShape:
    """How a drafter is searched. None: left to the drafter's config and the device."""

    num_beams: int | None = None
    draft_len_per_beam: int | None = None
    node_budget: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_size(field.name, value)

    def over(self, other: "TreeShape") -> "TreeShape":
        """This shape, with `other`'s values where it has none."""
        mine = {name: value for name, value in asdict(self).items() if value is not None}
        return TreeShape(**(asdict(other) | mine))
