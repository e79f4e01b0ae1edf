"""Make a Hugging Face causal LM write faster without changing a token of its output.

Words used everywhere: `B` rows, `W` beams, `K` draft length, `N` tree nodes, `S` cache slots, `D` hidden size, `E` exit
dim, `V` vocabulary. The *target* is the model whose text is wanted; the *drafter* is the recurrent head that guesses
it; a *proposer* turns guesses into a tree of *nodes*; the *accepted length* counts drafts only, *tokens per step* one
more.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redrafter.errors import (
    ArgumentError,
    CacheFullError,
    CheckpointError,
    MismatchError,
    ReDrafterError,
    UnsupportedError,
)
from redrafter.version import __version__

if TYPE_CHECKING:
    from redrafter.checkpoint import boxed_pair
    from redrafter.draft_target import DraftTarget
    from redrafter.drafter import DrafterConfig, RecurrentDrafter
    from redrafter.engine import Engine
    from redrafter.grammar import Grammar
    from redrafter.lookup import PromptLookup
    from redrafter.outputs import GenerateOutput, GenerateStats, Stats
    from redrafter.redrafter import ReDrafter
    from redrafter.streaming import StepStreamer

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CheckpointError",
    "DraftTarget",
    "DrafterConfig",
    "Engine",
    "GenerateOutput",
    "GenerateStats",
    "Grammar",
    "MismatchError",
    "PromptLookup",
    "ReDrafter",
    "ReDrafterError",
    "RecurrentDrafter",
    "Stats",
    "StepStreamer",
    "UnsupportedError",
    "__version__",
    "boxed_pair",
]

_here = Path(__file__).parent
if not (_here / "train").is_dir():  # a checkout, where `train` and `convert` stand beside this folder
    __path__.append(str(_here.parent))

# Module of each public name that needs torch: `redrafter --help` does not, and must not wait for it.
_MODULES = {
    "DraftTarget": "draft_target",
    "DrafterConfig": "drafter",
    "Engine": "engine",
    "GenerateOutput": "outputs",
    "GenerateStats": "outputs",
    "Grammar": "grammar",
    "PromptLookup": "lookup",
    "ReDrafter": "redrafter",
    "RecurrentDrafter": "drafter",
    "Stats": "outputs",
    "StepStreamer": "streaming",
    "boxed_pair": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
