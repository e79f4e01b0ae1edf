"""What each architecture is checked with: windows, lengths of prompts, and fields that change what a layer computes."""

from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configs import WINDOWS, default_config

__all__ = ["Variant", "architectures", "variants"]

SHORT, LONG = 4, 67  # windows; the small tree of binding reaches past one and not past the other
STRAY = ("llama", "granite", "gemma", "glm", "olmo", "nemotron")  # fine-tunes of these have fields that nothing reads
IGNORED = ("moshi",)  # its config names a window that it does not have
FORGETFUL = ("phi3",)  # before transformers 5.20 it goes on from one token alone where its rope switches
ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "falcon": {"alibi": {"alibi": True}, "grouped": {"new_decoder_architecture": True}},
    "gemma4_text": {"shared": {"num_kv_shared_layers": 2}},
    "gpt_bigcode": {"many heads": {"multi_query": False}},
    "llama": {
        "yarn": {"rope_parameters": ROPE | {"rope_type": "yarn"}},
        "llama3": {"rope_parameters": LLAMA3},
        "dynamic": {"rope_parameters": ROPE | {"rope_type": "dynamic"}},
    },
    "ministral3": {"scaled": {"rope_parameters": ROPE | {"rope_type": "yarn", "llama_4_scaling_beta": 0.5}}},
    "phi3": {"longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}},
    "stablelm": {"parallel": {"use_parallel_residual": True, "qk_layernorm": True}},
}


@dataclass(frozen=True)
class Variant:
    """A tiny config and how long the prompts are.

    name: For the report.
    window: What every window becomes; with None, those that a default config lacks stay away.
    longest: Tokens of the longest prompt.
    fields: What else the config has.
    served: Whether a refusal is a failure.
    cached: Whether `model.generate` keeps a cache. transformers' own forgets what lies past a window that a config
        names, even where the model sees it, and older releases' forgets all where a rope switches; without a cache its
        text is the model's.
    """

    name: str
    window: int | None
    longest: int
    fields: dict[str, Any] = field(default_factory=dict)
    served: bool = False
    cached: bool = True

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt. One is within a long window and crosses it while its text grows."""
        return [self.longest, self.longest - 1, LONG - 6 if self.longest > LONG else self.longest // 2, 3]


def architectures() -> list[str]:
    """Return the model types that `AutoModelForCausalLM` makes a model of."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def variants(model_type: str) -> list[Variant]:
    """Return what to check an architecture with."""
    try:
        text = default_config(model_type).get_text_config(decoder=True)
    except StrictDataclassError:  # an older release's type that refuses its own defaults: `check` tells why
        return [Variant("plain", None, 150)]
    windows = [getattr(text, name) for name in WINDOWS if hasattr(text, name)]
    found = []
    if None in windows or not windows or hasattr(text, "use_sliding_window"):
        found.append(Variant("plain", None, 150))
    if windows:
        cached = model_type not in IGNORED
        found += [Variant(f"window {w}", w, longest, cached=cached) for w, longest in ((SHORT, 23), (LONG, 150))]
    for name, fields in FIELDS.get(model_type, {}).items():
        cached = model_type not in FORGETFUL
        found += [
            Variant(n, None, longest, fields, cached=cached) for n, longest in ((name, 35), (f"{name}, long", 150))
        ]
    if model_type in STRAY:
        for window, longest in ((SHORT, 23), (LONG, 150)):
            fields = {"sliding_window": window}
            found.append(Variant(f"stray window {window}", None, longest, fields, served=True, cached=False))
    return found
