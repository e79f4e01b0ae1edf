"""What a server and its engine's process say to each other while the engine is loaded.

It imports no torch, so that the process can be started before the server has imported it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.errors import ArgumentError
from redrafter.serve.config import ServeOptions

__all__ = ["EngineFacts", "LoadEngine", "LoadFailed"]


@dataclass(frozen=True)
class LoadEngine:
    """The first message of a server: load this.

    Attributes:
        options: How much is served at once.
        load: The model and its drafter, and how to load them.
        draft: What drafts without a drafter.
    """

    options: ServeOptions
    load: LoadOptions
    draft: DraftOptions

    def __post_init__(self) -> None:
        if self.load.kv_host_cache_gib and not self.options.kv_cache_reuse:
            raise ArgumentError("--kv-host-cache-gib stores what --no-kv-cache-reuse never finds: leave one out")


@dataclass(frozen=True)
class EngineFacts:
    """The answer of an engine that is loaded: what its server must know of it.

    Attributes:
        model: Directory or hub id of the model.
        description: Lines for the log that say what is served.
        vocab_size: Number of token ids.
        context: Most tokens of a prompt and the text after it.
        end_tokens: Ids that end a text.
        sampling: Sampling parameters of requests that leave them out, by name.
        draft_depth: Levels of the deepest tree of drafts.
        reuse: Whether prompts are looked for in the cache.
        batch_invariant: Whether a text does not depend on what is computed beside it, bit for bit.
        adapters: Directories of the LoRA adapters that are loaded, by name.
        image_inputs: Names of what the model takes of images beside ids and mask; none where it takes no images.
        fp8_weights: Whether the weights of linear layers were quantised to FP8 when the model was loaded.
        fp8_activations: Whether the inputs of these layers are rounded to FP8 too.
        kv_cache_dtype: Format of stored keys and values; see `EngineOptions`.
    """

    model: str
    description: tuple[str, ...]
    vocab_size: int
    context: int
    end_tokens: frozenset[int]
    sampling: Mapping[str, float]
    draft_depth: int
    reuse: bool
    batch_invariant: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    image_inputs: frozenset[str] = frozenset()
    fp8_weights: bool = False
    fp8_activations: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class LoadFailed:
    """The answer of an engine that cannot be loaded.

    Attributes:
        error: Why.
    """

    error: Exception
