"""The shape of a tree of drafts, and the sizes that it may have. This module imports no torch."""

from dataclasses import asdict, dataclass

from redrafter.errors import ArgumentError

MAX_BEAMS = 1024  # also of levels; a tree's memory grows with the square of its nodes


def check_size(name: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` can be the number of beams, levels or nodes that argument `name` sets."""
    # `bool` is a subclass of `int`.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BEAMS**2:
        raise ArgumentError(f"{name} must be a positive integer, got {value!r}")
    if value > MAX_BEAMS and name != "node_budget":
        raise ArgumentError(f"{name} must be at most {MAX_BEAMS}, got {value}")


@dataclass(frozen=True)
class TreeShape:
    """Shape of the draft tree. A field that is None takes its default from the drafter's config or the device.

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
        for name, value in asdict(self).items():
            if value is not None:
                check_size(name, value)

    def __str__(self) -> str:
        nodes = f"{self.node_budget} nodes" if self.shared_nodes is None else f"{self.shared_nodes} shared"
        return f"{self.beams}x{self.depth}, {nodes}"

    @property
    def beams(self) -> int:
        """W, the number of beams, which must be set."""
        assert self.num_beams is not None
        return self.num_beams

    @property
    def depth(self) -> int:
        """K, the number of levels, which must be set."""
        assert self.draft_len_per_beam is not None
        return self.draft_len_per_beam

    @property
    def nodes(self) -> int:
        """N, the maximum number of nodes of a row's tree, which must be set."""
        assert self.node_budget is not None
        return self.node_budget

    @property
    def lattice(self) -> int:
        """Number of nodes that the whole search finds, including the root."""
        return 1 + self.beams * self.depth

    def over(self, other: "TreeShape") -> "TreeShape":
        """Return this shape with the fields that are None taken from `other`."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        return TreeShape(**(asdict(other) | chosen))

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields as JSON documents have them: `shared_nodes` only where rows share nodes."""
        return {name: value for name, value in asdict(self).items() if name != "shared_nodes" or value is not None}
