"""Shape of the tree that a drafter is searched for."""

from dataclasses import asdict, dataclass, fields

from redrafter.tree.token_tree import check_size


@dataclass(frozen=True)
class TreeShape:
    """Shape of the draft tree. A field that is None is left to the drafter's config and the device.

    Attributes:
        num_beams: Beams of the search.
        draft_len_per_beam: Draft tokens of each beam.
        node_budget: Most nodes of a row's tree.
        shared_nodes: Nodes of all rows of a step together, which are the likeliest ones; None for `node_budget` nodes
            in each row.
    """

    num_beams: int | None = None
    draft_len_per_beam: int | None = None
    node_budget: int | None = None
    shared_nodes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_size(field.name, value)

    def over(self, other: "TreeShape") -> "TreeShape":
        """Return this shape with the fields that are None taken from `other`."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        return TreeShape(**(asdict(other) | chosen))

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields as JSON documents have them: `shared_nodes` only where rows share nodes."""
        return {name: value for name, value in asdict(self).items() if name != "shared_nodes" or value is not None}
