"""The features of models, engines and servers, and which of them exclude each other: one table and one message.

A feature declares which of the features above it it excludes, and why. Code that uses a feature adds it to the
`FeatureSet` of the model, or checks it against that set, and needs no knowledge of other features.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from redrafter.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that a model, an engine or a server may have, and that other features may exclude.

    Attributes:
        words: Its name in messages.
        remedy: What to type in order to do without it; empty if the user cannot decide.
        excludes: Features that cannot be combined with it, with the reason for each, a main clause.
    """

    words: str
    remedy: str = ""
    excludes: Mapping["Feature", str] = field(default_factory=dict, repr=False)


class FeatureSet:
    """The features that one model, engine or server has; none of them excludes another."""

    def __init__(self, owner: str, *features: Feature):
        """Make a set of features; `owner` names their owner in messages."""
        self._owner, self._features = owner, dict.fromkeys(features)

    def __contains__(self, feature: Feature) -> bool:
        return feature in self._features

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def conflict(self, feature: Feature) -> str | None:
        """Return why a feature conflicts with one of these, and what to type; None without a conflict."""
        for other in self._features:
            # Declared on one side only, so both directions are looked up.
            if reason := feature.excludes.get(other) or other.excludes.get(feature):
                remedies = ", or ".join(each.remedy for each in (feature, other) if each.remedy)
                return f"{feature.words} and {other.words} exclude each other: {reason}; {remedies}"
        return None

    def check(self, feature: Feature) -> None:
        """Raise `UnsupportedError` if a feature cannot be combined with one of these."""
        if conflict := self.conflict(feature):
            raise UnsupportedError(f"{self._owner}: {conflict}")

    def add(self, feature: Feature, found: bool = True) -> None:
        """Add a feature if it is `found`; raise `UnsupportedError` if it cannot be combined with one of these."""
        if found:
            self.check(feature)
            self._features[feature] = None


# Features that follow from the model or its checkpoint.

RECURRENT_STATES = Feature("layers with recurrent states")
CHUNKED_ATTENTION = Feature("attention within chunks")
INDEXED_ATTENTION = Feature("attention to tokens that an indexer chooses")
ROPE_BY_LENGTH = Feature("a rope that depends on the sequence length")
SWITCHING_ROPE = Feature("a rope that switches at a sequence length")
QUANTISED_WEIGHTS = Feature("weights that another library quantised", "load it unquantised")
GGUF_FILE = Feature("weights in a GGUF file")
OWNERS_HOOKS = Feature("forward hooks of the model's owner", "remove the hooks")

# Features of how the model is loaded and computed.

_ONCE = {QUANTISED_WEIGHTS: "weights are quantised once"}
FP8_WEIGHTS = Feature("FP8 weights", "leave out quantization='fp8' (--quantization fp8)", _ONCE)
GROUPED_WEIGHTS = Feature("weights in groups of 4 or 8 bits", "leave out quantization (--quantization)", _ONCE)
TENSOR_PARALLELISM = Feature(
    "tensor parallelism",
    "run it in one process, without tp_size and torchrun",
    {
        RECURRENT_STATES: "states are not split between processes",
        QUANTISED_WEIGHTS: "quantised weights cannot be split yet",
        FP8_WEIGHTS: "quantised weights cannot be split yet",
        GGUF_FILE: "the file is read whole",
    },
)
EAGER_FORWARD = Feature("compile=False on a GPU", "leave out compile=False (--no-compile)")
BATCH_INVARIANCE = Feature(
    "batch_invariant=True",
    "leave out batch_invariant=True (--batch-invariant)",
    {
        RECURRENT_STATES: "recurrences sum in another order",
        CHUNKED_ATTENTION: "attention in one fixed order does not support chunks",
        QUANTISED_WEIGHTS: "their products are the quantiser's own",
        FP8_WEIGHTS: "their products sum in an order that depends on the number of tokens",
        OWNERS_HOOKS: "a forward with hooks is not compiled",
        TENSOR_PARALLELISM: "ranks sum in another order",
        EAGER_FORWARD: "only the compiled forward has one fixed order there",
    },
)
ADAPTERS = Feature(
    "LoRA adapters",
    "merge the adapter into the model with PEFT's merge_and_unload()",
    {
        RECURRENT_STATES: "such layers are called with other tokens than the forward's",
        BATCH_INVARIANCE: "it computes one model for all rows, and an adapter differs by row",
    },
)
ENCODER_ADAPTER = Feature("an adapter of layers that encode images", ADAPTERS.remedy)
IMAGES = Feature(
    "images in prompts",
    "pass text alone (without --image)",
    {
        RECURRENT_STATES: "states are not copied from the forward that reads images",
        INDEXED_ATTENTION: "the indexer's keys are not copied from the forward that reads images",
        SWITCHING_ROPE: "a sequence with images is not recomputed where the rope switches",
        TENSOR_PARALLELISM: "the part that encodes images is not split between processes",
        BATCH_INVARIANCE: "images of a batch are encoded together",
        ENCODER_ADAPTER: "images are encoded without adapters",
    },
)

# What drafts, and how drafts are accepted.

OWN_DRAFTS = Feature("drafts of a text's own")

ASSISTANT = Feature(
    "an assistant",
    "give another drafter",
    {TENSOR_PARALLELISM: "it attends to whole keys and values of its target, which are split"},
)
OTHER_TOKENIZER = Feature(
    "a draft model with another tokenizer",
    "take one with the model's tokenizer, or one whose layers are all attention",
    {RECURRENT_STATES: "one token may be several of the draft model's, and its states lag by one token"},
)
DRAFT_TREES = Feature("num_beams above 1", "leave out num_beams")
ADAPTIVE_DRAFTS = Feature("adaptive drafts", "leave out adaptive (--adaptive)")
REJECTION_SAMPLING = Feature(
    "acceptance='rejection'",
    "take acceptance='match', which takes both",
    {
        DRAFT_TREES: "it is exact for one sampled chain only",
        ADAPTIVE_DRAFTS: "the text would depend on lengths that other texts decide too",
    },
)

# Features of an engine or a server between requests.

NO_PREFIX_REUSE = Feature("--no-kv-cache-reuse", "leave out --no-kv-cache-reuse")
HOST_CACHE = Feature(
    "kv_host_cache_gib (--kv-host-cache-gib)",
    "leave out kv_host_cache_gib",
    {
        TENSOR_PARALLELISM: "blocks on the host belong to one process",
        NO_PREFIX_REUSE: "prefixes on the host would never be reused",
    },
)
WEIGHT_UPDATES = Feature("updates of weights", "make a new engine", {QUANTISED_WEIGHTS: "their format is its own"})
ASYNC_CALLS = Feature(
    "agenerate() and astream()",
    "call generate() on all ranks",
    {TENSOR_PARALLELISM: "calls join running ones at times that differ between processes"},
)
