"""Arguments of `generate`: which are known, which are refused by name, and what they are in transformers' terms."""

import copy
import difflib
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.grammar.grammar import Grammar
from redrafter.sampling.hf_processors import TemperaturePerRow
from redrafter.sampling.params import NUMBERS

# Arguments of `model.generate` that are not in its GenerationConfig and are honoured here.
_CALL_ARGUMENTS = frozenset(
    {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer", "grammar"}
)

# Parameters of rows that transformers has no names for, or other ones.
_OWN = [name for name in NUMBERS if name not in GenerationConfig().to_dict()]

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
    return set(GenerationConfig().to_dict()) | _CALL_ARGUMENTS | {*_OWN, "logit_bias"}


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


# Arguments of `model.generate` that have no meaning here: the values that wrappers pass on by habit and that ask for
# nothing, and what to do instead where another value was given.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "inputs_embeds": ((None,), "pass input_ids and attention_mask"),
    "past_key_values": ((None,), "pass the whole text as input_ids"),
    "position_ids": ((None,), "leave it out: positions follow from attention_mask"),
    "cache_position": ((None,), "leave it out: positions follow from attention_mask"),
    "token_type_ids": ((None,), "leave it out"),
    "negative_prompt_ids": ((None,), "leave it out"),
    "negative_prompt_attention_mask": ((None,), "leave it out"),
    "assistant_model": ((None,), "make the engine with DraftTarget.from_pretrained(model, assistant_model)"),
    "assistant_tokenizer": ((None,), "give it to DraftTarget.from_pretrained, as draft_tokenizer"),
    "custom_generate": ((None,), "call engine.model.generate(custom_generate=...) for another way of decoding"),
    "synced_gpus": ((None, False), "leave it out"),
    "logits_to_keep": ((None, 0, 1), "leave it out, or ask for output_logits=True"),
    "trust_remote_code": ((None, False, True), "give it to from_pretrained"),
}

# Those of them that say nothing of a text, whatever a model's forward may take them for.
NEUTRAL = _NEUTRAL.keys() - {"token_type_ids"}


def without_neutral(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that ask for nothing.

    Raises:
        UnsupportedError: Naming an argument that asks for what `generate` does not do.
    """
    kept = {}
    for name, value in arguments.items():
        if name not in _NEUTRAL:
            kept[name] = value
            continue
        values, instead = _NEUTRAL[name]
        if isinstance(value, Tensor) or value not in values:
            raise UnsupportedError(f"generate() does not take {name}; {instead}")
    return kept


def prompt_of(input_ids: Any, inputs: Any) -> Any:
    """Return the prompt, which transformers also calls `inputs`; `ArgumentError` for both and for neither."""
    if input_ids is not None and inputs is not None:
        raise ArgumentError("inputs is another name of input_ids: pass one of them")
    if input_ids is None and inputs is None:
        raise ArgumentError("there is no prompt: pass input_ids")
    return inputs if input_ids is None else input_ids


def split_own(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments in transformers' terms, and those parameters of rows for which it has none."""
    others = {name: value for name, value in arguments.items() if name not in (*_OWN, "logit_bias", "grammar")}
    own = {name: value for name in _OWN if (value := arguments.get(name)) is not None}
    for name, value in own.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    if bias := arguments.get("logit_bias"):
        if not isinstance(bias, Mapping) or not all(isinstance(token, int) for token in bias):
            raise ArgumentError(f"logit_bias is a dict from token ids to numbers, got {bias!r}")
        others["sequence_bias"] = {(token,): float(value) for token, value in bias.items()} | dict(
            others.get("sequence_bias") or {}
        )

    def read(grammar: Any) -> Grammar | None:
        if grammar is None or isinstance(grammar, Grammar):
            return grammar
        if arguments.get("tokenizer") is None:
            raise ArgumentError("grammar needs the tokenizer: pass tokenizer=tokenizer to generate(), or a Grammar")
        return Grammar.of(grammar, arguments["tokenizer"])

    if (given := arguments.get("grammar")) is not None:
        own["grammar"] = [read(each) for each in given] if isinstance(given, list | tuple) else read(given)
    return others, own


def with_row_temperatures(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's arguments with a list of temperatures, one per output row, as a logits processor.

    The processor comes last of the user's own, behind which transformers would put a temperature. It makes none for 1.
    """
    temperature = arguments.get("temperature")
    if not isinstance(temperature, list | tuple | Tensor):
        return dict(arguments)
    processors = LogitsProcessorList([*(arguments.get("logits_processor") or []), TemperaturePerRow(temperature)])
    return {**arguments, "temperature": 1.0, "logits_processor": processors}


def with_stop_strings(
    arguments: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig
) -> tuple[dict[str, Any], GenerationConfig | None]:
    """Return the call's arguments and generation config with stop strings as a criterion.

    transformers looks for their tokenizer where custom decoding never receives it, so the criterion is made here.
    Arguments come before the call's `config`, which is not changed, and that before the model's `own`.
    """
    kept = dict(arguments)
    tokenizer = kept.pop("tokenizer", None)
    given = [c.stop_strings for c in (config, own) if c is not None and c.stop_strings is not None]
    strings = kept.pop("stop_strings") if "stop_strings" in kept else next(iter(given), None)
    if given:
        if config is not None and own.stop_strings is None:
            config = copy.deepcopy(config)
            config.stop_strings = None
        else:
            kept["stop_strings"] = None
    if strings is None:
        return kept, config
    if tokenizer is None:
        raise ArgumentError("stop_strings needs the tokenizer: pass tokenizer=tokenizer to generate()")
    criteria = StoppingCriteriaList(kept.pop("stopping_criteria", None) or [])
    criteria.append(StopStringCriteria(tokenizer, strings))
    return kept | {"stopping_criteria": criteria}, config
