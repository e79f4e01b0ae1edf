"""Which arguments and modes of `generate` are known, and which are refused by name."""

import difflib
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from redrafter.errors import ArgumentError, UnsupportedError

__all__ = ["OPENAI_ARGUMENTS", "check_arguments", "check_bound", "check_modes", "known_arguments"]

# Arguments of `model.generate` that are not in its GenerationConfig and are honoured here.
_CALL_ARGUMENTS = frozenset(
    {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer", "grammar"}
)

# OpenAI's names of what transformers has other ones for, or none.
OPENAI_ARGUMENTS = ("frequency_penalty", "presence_penalty", "logit_bias")

# Decoding modes and outputs that are refused: argument, and the values that leave it off.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "token_healing": (None, False),
    "low_memory": (None, False),
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
}

# Settings of transformers' own speculation and reading of prompts, which change no token: argument, and the values that
# leave it off. They are refused where a call asks for them and ignored where only the checkpoint's config does.
_NOT_OURS: dict[str, tuple[Any, ...]] = {
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "is_assistant": (None, False),
    "num_assistant_tokens": (None, 20),
    "num_assistant_tokens_schedule": (None, "constant"),
    "assistant_confidence_threshold": (None, 0.4),
    "assistant_ensemble_weight": (None,),
    "assistant_lookbehind": (None, 10),
    "target_lookbehind": (None, 10),
    "max_matching_ngram_size": (None,),
    "prefill_chunk_size": (None,),
}


def check_bound(engine: type, given: object, kind: Any) -> None:
    """Refuse a part that the constructor of an engine does not take and its `from_pretrained` may."""
    if not isinstance(given, kind):
        shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        raise ArgumentError(
            f"{engine.__name__}() takes parts that are loaded and bound, not {shown}; "
            f"{engine.__name__}.from_pretrained takes names, directories and models of transformers"
        )


def known_arguments() -> set[str]:
    """Return the names that `generate` has a meaning for."""
    return set(GenerationConfig().to_dict()) | _CALL_ARGUMENTS | set(OPENAI_ARGUMENTS)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that are unknown, and those that cannot be honoured."""
    known = known_arguments()
    for name, value in arguments.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"generate() has no argument {name!r}{hint}")
        _refuse_mode(name, value)


def check_modes(config: GenerationConfig, own: GenerationConfig) -> None:
    """Refuse what a config asks for and cannot be honoured.

    Args:
        config: The call's, as it was given or with the model's own merged into it.
        own: The checkpoint's, whose choices nobody made in the call. Those of a cache or of drafts are ignored, as they
            change no token, but for a cache that rounds keys and values.
    """
    for name in (*_REFUSED, *_NOT_OURS):
        value = getattr(config, name, None)
        ignored = name in _NOT_OURS or (name == "cache_implementation" and value != "quantized")
        if not ignored or value != getattr(own, name, None):
            _refuse_mode(name, value)


def _refuse_mode(name: str, value: Any) -> None:
    if name in _REFUSED and value not in _REFUSED[name]:
        raise UnsupportedError(f"{name}={value!r} cannot be honoured with exact speculation; leave it out")
    if name in _NOT_OURS and value not in _NOT_OURS[name]:
        raise UnsupportedError(
            f"{name}={value!r} is for transformers' own way of reading prompts and drafting; leave it out: what drafts "
            "here, and how far, is an argument of from_pretrained"
        )
