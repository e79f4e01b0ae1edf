"""Make a Hugging Face causal LM write faster without changing a token of its output.

Words used everywhere: `B` rows, `W` beams, `K` draft length, `N` tree nodes, `S` cache slots, `D` hidden size, `E` exit
dim, `V` vocabulary. The *target* is the model whose text is wanted; the *drafter* is the recurrent head that guesses
it; a *proposer* turns guesses into a tree of *nodes*; the *accepted length* counts drafts only, *tokens per step* one
more.
"""

import importlib
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
    from redrafter.checkpoints.merged import boxed_pair
    from redrafter.drafting.drafter import DrafterConfig, RecurrentDrafter
    from redrafter.engine.draft_target import DraftTarget
    from redrafter.engine.engine import Engine
    from redrafter.engine.outputs import GenerateOutput, GenerateStats, Stats
    from redrafter.engine.prompt_lookup import PromptLookup
    from redrafter.engine.recurrent import ReDrafter
    from redrafter.engine.streaming import StepStreamer
    from redrafter.grammar.grammar import Grammar

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

# Module of each public name that needs torch: `redrafter --help` does not, and must not wait for it.
_MODULES = {
    "DraftTarget": "engine.draft_target",
    "DrafterConfig": "drafting.drafter",
    "Engine": "engine.engine",
    "GenerateOutput": "engine.outputs",
    "GenerateStats": "engine.outputs",
    "Grammar": "grammar.grammar",
    "PromptLookup": "engine.prompt_lookup",
    "ReDrafter": "engine.recurrent",
    "RecurrentDrafter": "drafting.drafter",
    "Stats": "engine.outputs",
    "StepStreamer": "engine.streaming",
    "boxed_pair": "checkpoints.merged",
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
