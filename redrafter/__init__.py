"""Make a Hugging Face causal LM write faster without changing a token of its output.

Words used everywhere: `B` rows, `W` beams, `K` draft length, `N` tree nodes, `S` cache slots, `D` hidden size, `E` exit
dim, `V` vocabulary. The *target* is the model whose text is wanted; the *drafter* is the recurrent head that guesses
it; a *proposer* turns guesses into a tree of *nodes*; the *accepted length* counts drafts only, *tokens per step* one
more.
"""

from redrafter.checkpoint import boxed_pair
from redrafter.drafter import DrafterConfig, RecurrentDrafter
from redrafter.engine import Engine
from redrafter.errors import ArgumentError, CheckpointError, MismatchError, ReDrafterError, UnsupportedError
from redrafter.outputs import GenerateOutput, GenerateStats, Stats
from redrafter.redrafter import ReDrafter
from redrafter.streaming import StepStreamer
from redrafter.version import __version__

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "DrafterConfig",
    "Engine",
    "GenerateOutput",
    "GenerateStats",
    "MismatchError",
    "ReDrafter",
    "ReDrafterError",
    "RecurrentDrafter",
    "Stats",
    "StepStreamer",
    "UnsupportedError",
    "__version__",
    "boxed_pair",
]
