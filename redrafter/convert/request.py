"""What is converted, and what was asked for."""

from dataclasses import dataclass, field
from pathlib import Path

from redrafter.checkpoints.merged import Defaults
from redrafter.checkpoints.tree_shape import TreeShape
from redrafter.convert.source_base import SourceBase
from redrafter.convert.source_drafter import SourceDrafter

__all__ = ["ConversionRequest", "ConversionSource"]


@dataclass(frozen=True)
class ConversionSource:
    """What is converted.

    Attributes:
        drafter: The drafter.
        base: The base, if there is one.
        tokenizer: Directory of a tokenizer for the output, where the base has none.
    """

    drafter: SourceDrafter
    base: SourceBase | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class ConversionRequest:
    """What was asked for beside the output format; None leaves a value as it is in the source.

    Attributes:
        defaults: Search and sampling defaults.
        dtype: Number format of the drafter, and for TensorRT-LLM of the base too, such as "float16".
        tp: Ranks of a TensorRT-LLM checkpoint.
    """

    defaults: Defaults = field(default_factory=Defaults)
    dtype: str | None = None
    tp: int | None = None

    def defaults_for(self, drafter: SourceDrafter) -> Defaults:
        """Return the defaults to write: as asked for, or else the source's, or else those of the drafter's config."""
        config_shape = TreeShape(drafter.config.draft_beams, drafter.config.draft_len_per_beam)
        source, greedy_search = drafter.defaults, self.defaults.greedy_search
        if greedy_search is None:
            greedy_search = source.greedy_search
        return Defaults(self.defaults.shape.over(source.shape).over(config_shape), greedy_search)
