"""The kinds of attention of a model's layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from redrafter.attention.mask import AttentionKind

__all__ = ["LayerKinds"]


@dataclass(frozen=True)
class LayerKinds:
    """The kind of attention of each layer of a model.

    Attributes:
        by_layer: Kind of each decoder layer, in order; None when it could not be observed.
        by_name: Kinds under the names that the model takes masks by: one entry where all layers see alike, else one for
            each of `config.layer_types`.
    """

    by_layer: tuple[AttentionKind, ...] | None
    by_name: Mapping[str, AttentionKind]

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Positions that each layer looks back, 0 for all; empty when the layers' kinds are not known."""
        return tuple(kind.window or 0 for kind in self.by_layer or ())

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Positions of a chunk of each layer, 0 for all; empty where no layer attends within chunks."""
        sizes = tuple(kind.chunk or 0 for kind in self.by_layer or ())
        return sizes if any(sizes) else ()
