"""Make a Hugging Face causal LM generate faster without changing a token of its output.

Letters for sizes, the same in all modules:
    `B` rows, `W` beams, `K` draft length, `N` tree nodes, `S` cache slots, `D` hidden size, `E` exit dim (width of the
    drafter's head), `V` vocabulary.

Words, the same in all modules:
    *target*: the model whose text is wanted. *drafter*: the small head that guesses the text. *draft model*: a
    smaller LM that guesses it instead. *proposer*: turns guesses into a tree of *nodes*. *committed* tokens have their
    keys and values in the cache; the *pending* token is the next one, known but not in the cache. *accepted length*:
    drafts that a step keeps. *tokens per step*: accepted length plus one.

Start reading at `redrafter/step.py`, which is one step of decoding from top to bottom.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from redrafter.errors import (
    ArgumentError,
    CacheFullError,
    CheckpointError,
    MismatchError,
    NotFiniteError,
    ReDrafterError,
    ReDrafterWarning,
    UnsupportedError,
)
from redrafter.version import __version__

if TYPE_CHECKING:
    from redrafter.checkpoints.merged import boxed_pair
    from redrafter.drafting.dflash import DFlashDrafter
    from redrafter.drafting.dflash_config import DFlashConfig
    from redrafter.drafting.drafter import RecurrentDrafter
    from redrafter.drafting.drafter_config import DrafterConfig, EagleConfig
    from redrafter.drafting.eagle import EagleDrafter
    from redrafter.engine.call import GenerateOutput, GenerateStats
    from redrafter.engine.draft_target import DraftTarget
    from redrafter.engine.engine import Engine
    from redrafter.engine.options import EngineOptions
    from redrafter.engine.prompt_lookup import PromptLookup
    from redrafter.engine.redrafter import ReDrafter
    from redrafter.engine.streamers import StepStreamer
    from redrafter.grammar.grammar import Grammar
    from redrafter.scheduler.sequence import Stats

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CheckpointError",
    "DFlashConfig",
    "DFlashDrafter",
    "DraftTarget",
    "DrafterConfig",
    "EagleConfig",
    "EagleDrafter",
    "Engine",
    "EngineOptions",
    "GenerateOutput",
    "GenerateStats",
    "Grammar",
    "MismatchError",
    "NotFiniteError",
    "PromptLookup",
    "ReDrafter",
    "ReDrafterError",
    "ReDrafterWarning",
    "RecurrentDrafter",
    "Stats",
    "StepStreamer",
    "UnsupportedError",
    "__version__",
    "boxed_pair",
]

# Module of each public name that needs torch. They are imported on first use: `redrafter --help` needs no torch and
# must not wait for it.
_MODULES = {
    "DFlashConfig": "drafting.dflash_config",
    "DFlashDrafter": "drafting.dflash",
    "DraftTarget": "engine.draft_target",
    "DrafterConfig": "drafting.drafter_config",
    "EagleConfig": "drafting.drafter_config",
    "EagleDrafter": "drafting.eagle",
    "Engine": "engine.engine",
    "EngineOptions": "engine.options",
    "GenerateOutput": "engine.call",
    "GenerateStats": "engine.call",
    "Grammar": "grammar.grammar",
    "PromptLookup": "engine.prompt_lookup",
    "ReDrafter": "engine.redrafter",
    "RecurrentDrafter": "drafting.drafter",
    "Stats": "scheduler.sequence",
    "StepStreamer": "engine.streamers",
    "boxed_pair": "checkpoints.merged",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


# `AutoConfig` knows our configs once their modules are imported, which the first use of a public name does. Where
# transformers is there already, that costs nothing; and it must not be imported for them.
if "transformers.models.auto.configuration_auto" in sys.modules:
    importlib.import_module(f"{__name__}.drafting.dflash_config")  # and those of the other drafters with it


def __dir__() -> list[str]:
    """List the public names, whether imported yet or not, without the names that this module imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
