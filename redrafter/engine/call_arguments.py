"""Arguments of `generate` that are read before transformers prepares the call."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from redrafter.engine.argument_checks import OPENAI_ARGUMENTS
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.grammar.grammar import Grammar
from redrafter.sampling.grammar_masks import GrammarProcessor
from redrafter.sampling.hf_processors import TemperaturePerRow, TokenPenalties

__all__ = [
    "NEUTRAL",
    "prompt_of",
    "with_grammar",
    "with_openai_arguments",
    "with_row_temperatures",
    "with_stop_strings",
    "without_neutral",
]

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


def with_openai_arguments(arguments: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return the arguments with OpenAI's ones in transformers' terms; `width` is the padded prompt's."""
    others = {name: value for name, value in arguments.items() if name not in OPENAI_ARGUMENTS}
    frequency, presence = (arguments.get(name) or 0.0 for name in OPENAI_ARGUMENTS[:2])
    for name, value in (("frequency_penalty", frequency), ("presence_penalty", presence)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    if frequency or presence:
        given = others.get("logits_processor") or []
        others["logits_processor"] = LogitsProcessorList([*given, TokenPenalties(frequency, presence, width)])
    if bias := arguments.get("logit_bias"):
        if not isinstance(bias, Mapping) or not all(isinstance(token, int) for token in bias):
            raise ArgumentError(f"logit_bias is a dict from token ids to numbers, got {bias!r}")
        others["sequence_bias"] = {(token,): float(value) for token, value in bias.items()} | dict(
            others.get("sequence_bias") or {}
        )
    return others


def with_grammar(arguments: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return the arguments with `grammar` as the last logits processor; `width` is the padded prompt's."""
    rest = {name: value for name, value in arguments.items() if name != "grammar"}
    given, tokenizer = arguments.get("grammar"), arguments.get("tokenizer")
    if given is None:
        return rest

    def read(grammar: Any) -> Grammar | None:
        if grammar is None or isinstance(grammar, Grammar):
            return grammar
        if tokenizer is None:
            raise ArgumentError("grammar needs the tokenizer: pass tokenizer=tokenizer to generate(), or a Grammar")
        return Grammar.of(grammar, tokenizer)

    grammars = [read(grammar) for grammar in given] if isinstance(given, list | tuple) else read(given)
    processors = rest.get("logits_processor") or []
    return rest | {"logits_processor": LogitsProcessorList([*processors, GrammarProcessor(grammars, width)])}


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

    Args:
        arguments: Of the call, which come before what `config` says.
        config: The call's generation config, if any; it is not changed.
        own: The model's generation config, which comes last.
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
