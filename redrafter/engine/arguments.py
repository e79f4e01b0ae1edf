"""The arguments of a call of `generate`: known, or refused by name, and translated to transformers' names.

Hugging Face's own `generate` then prepares the call: configs merged, processors and criteria built, sequences expanded.
So names and meanings are its own.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from redrafter.cache.dense import CACHE_NAMES
from redrafter.engine.model_inputs import separate_inputs
from redrafter.engine.streamers import takes_columns
from redrafter.errors import ArgumentError, UnsupportedError, did_you_mean, first_line
from redrafter.grammar.grammar import Grammar
from redrafter.model.target import Target
from redrafter.sampling.params import NUMBERS

# Earlier releases warn of ids on the host for a model on another device.
PREPARES_ON_HOST = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)

# Arguments of `model.generate` that are not in its GenerationConfig and are honoured here.
_OF_CALL = frozenset({"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer", "grammar"})

# Parameters of rows that transformers does not have, or has under other names.
_OWN = [name for name in NUMBERS if name not in GenerationConfig().to_dict()]

# Decoding modes and outputs that are refused: argument, and the values that leave it off.
_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), (None, 1)),
    **dict.fromkeys(("penalty_alpha", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("dola_layers", "watermarking_config", "constraints", "force_words_ids"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "cache_implementation"), (None,)),
    **dict.fromkeys(("token_healing", "low_memory", "output_attentions", "output_hidden_states"), (None, False)),
}

# Settings of transformers' own speculation and reading of prompts, which change no token: argument, and the values that
# leave it off. They are refused where a call asks for them and ignored where only the checkpoint's config does.
_NOT_OURS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("use_mtp", "is_assistant"), (None, False)),
    **dict.fromkeys(("speculation_type", "assistant_ensemble_weight"), (None,)),
    **dict.fromkeys(("max_matching_ngram_size", "prefill_chunk_size"), (None,)),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (None, 10)),
    "num_assistant_tokens": (None, 20),
    "num_assistant_tokens_schedule": (None, "constant"),
    "assistant_confidence_threshold": (None, 0.4),
}

_POSITIONS = ("position_ids", "cache_position")
_UNUSED = ("token_type_ids", "negative_prompt_ids", "negative_prompt_attention_mask")

# Arguments of `model.generate` that have no meaning here: the values that wrappers pass on by habit and that ask for
# nothing, and what to do instead where another value was given.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "inputs_embeds": ((None,), "pass input_ids and attention_mask"),
    **dict.fromkeys(CACHE_NAMES, ((None,), "pass the whole text as input_ids")),
    **dict.fromkeys(_POSITIONS, ((None,), "leave it out: positions follow from attention_mask")),
    **dict.fromkeys(_UNUSED, ((None,), "leave it out")),
    "assistant_model": ((None,), "make the engine with DraftTarget.from_pretrained(model, assistant_model)"),
    "assistant_tokenizer": ((None,), "give it to DraftTarget.from_pretrained, as draft_tokenizer"),
    "custom_generate": ((None,), "call engine.model.generate(custom_generate=...) for another way of decoding"),
    "synced_gpus": ((None, False), "leave it out"),
    "logits_to_keep": ((None, 0, 1), "leave it out, or ask for output_logits=True"),
    "trust_remote_code": ((None, False, True), "give it to from_pretrained"),
}

Seed: TypeAlias = int | Sequence[int] | None
DraftLimits: TypeAlias = int | Sequence[int] | None
AdapterNames: TypeAlias = str | Sequence[str | None] | None


class OwnArguments(NamedTuple):
    """Arguments of a call that transformers does not have, documented at `Engine.generate`."""

    streamer: Any = None
    seed: Seed = None
    adapter: AdapterNames = None
    speculate: bool = True
    num_speculative_tokens: DraftLimits = None
    progress: bool = False


class PreparedCall(NamedTuple):
    """A call as transformers has prepared it."""

    own: OwnArguments
    input_ids: Tensor  # `[B, P]`, a row for each output row
    inputs: Mapping[str, Any]  # further arguments of a decoding loop: config, processors, criteria, inputs of the model
    prompts: int | None = None  # each of which has as many output rows; None for as many as rows
    device: torch.device | None = None  # where ids are returned; None for where they are given
    params: Mapping[str, Any] = MappingProxyType({})  # of rows: numbers, and `grammar`, one or a list of one or None
    temperature: Sequence[float] | Tensor | None = None  # of each output row, in place of the config's


def prepare_call(
    target: Target,
    do_sample: bool | None,
    own: OwnArguments,
    /,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **generation_kwargs: object,
) -> PreparedCall:
    """Check the arguments of a call of `generate`, and let transformers prepare it.

    Args:
        target: The model that generates.
        do_sample: Whether to sample where neither the call nor a `generation_config` sets it; None for the model's own
            default.
        own: The arguments that transformers does not have.
        input_ids: As in `Engine.generate`.
        attention_mask: As in `Engine.generate`.
        generation_config: As in `Engine.generate`.
        generation_kwargs: As in `Engine.generate`.

    Raises:
        ArgumentError: For arguments that are unknown, out of range or of the wrong shape.
        UnsupportedError: For modes that cannot be honoured.
    """
    # 1. Read the arguments: drop those without effect, reject unsupported ones.
    defaults = target.model.generation_config
    streamer = own.streamer if takes_columns(own.streamer) else None
    # Types of tokens carry no information about text, but mark the images in it.
    kwargs, images = separate_inputs(generation_kwargs, target, _known() | (_NEUTRAL.keys() - {"token_type_ids"}))
    kwargs = read_arguments(kwargs)
    if (inputs := kwargs.pop("inputs", None)) is not None:
        if input_ids is not None:
            raise ArgumentError("inputs is another name of input_ids: pass one of them")
        input_ids = inputs
    if not isinstance(generation_config, GenerationConfig | None):
        raise ArgumentError(f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}")
    if generation_config is not None:
        check_modes(generation_config, defaults)

    # 2. Check the shapes that transformers relies on. The tokens are checked when the sequences are submitted.
    input_ids = check_shapes(input_ids, attention_mask)

    # 3. Translate arguments that transformers does not have, or would not pass on.
    kwargs, params = split_own(kwargs)
    kwargs, generation_config = with_stop_strings(kwargs, generation_config, defaults)
    # A config passed with the call takes precedence over the checkpoint's default.
    if do_sample is not None and generation_config is None:
        kwargs.setdefault("do_sample", do_sample)
    # The cache that transformers would make costs as much time as the rest of its preparation.
    if not images:  # which are read with what transformers prepares
        kwargs, generation_config = without_cache(kwargs, generation_config, defaults)

    settings = ("exponential_decay_length_penalty", "eos_token_id")
    penalty, end = (_setting(name, kwargs, generation_config, defaults) for name in settings)
    if penalty is not None and end is None:  # for which transformers raises an error of torch
        raise ArgumentError("exponential_decay_length_penalty needs an end token: pass eos_token_id")

    # 4. Let transformers prepare the call: configs, processors, criteria, rows.
    device, temperature = target.device, params.pop("temperature", None)
    if PREPARES_ON_HOST and not target.image_arguments:
        device = torch.device("cpu")  # or each number that follows from ids and mask would be a launch, some a wait
    prompts = len(input_ids)

    def prepared(model: PreTrainedModel, input_ids: Tensor, **inputs: object) -> PreparedCall:
        return PreparedCall(own, input_ids, inputs, prompts, target.device, params, temperature)

    try:
        return target.model.generate(
            input_ids.to(device),
            attention_mask=None if attention_mask is None else attention_mask.to(device),
            generation_config=generation_config,
            streamer=streamer,
            custom_generate=prepared,
            **images,
            **kwargs,
        )
    except (ValueError, ImportError) as error:
        raise ArgumentError(str(error)) from error
    except (TypeError, IndexError, RuntimeError) as error:  # of transformers' own code, which names no argument
        if images and not isinstance(error, TypeError | torch.OutOfMemoryError):
            raise ArgumentError(f"the model cannot read these images: {first_line(error)}") from error
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            raise
        names = ", ".join(("input_ids", *generation_kwargs, "generation_config"))
        raise ArgumentError(f"one of {names} has a value of a wrong type: {first_line(error)}") from error


def read_arguments(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `generate` without arguments that have no effect.

    Raises:
        ArgumentError: Naming one that is unknown.
        UnsupportedError: Naming one that `generate` does not support.
    """
    kept, known = {}, _known()
    for name, value in arguments.items():
        if name not in _NEUTRAL:
            kept[name] = value
        # A tensor has no truth value, so it is not compared with the neutral ones.
        elif isinstance(value, Tensor) or value not in _NEUTRAL[name][0]:
            raise UnsupportedError(f"generate() does not take {name}; {_NEUTRAL[name][1]}")
    for name, value in kept.items():
        if name not in known:
            raise ArgumentError(f"generate() has no argument {name!r}{did_you_mean(name, known)}")
        _refuse_mode(name, value)
    return kept


@functools.cache
def _known() -> frozenset[str]:
    return _OF_CALL.union(GenerationConfig().to_dict(), _OWN, ("inputs", "logit_bias"))


def check_modes(config: GenerationConfig, own: GenerationConfig) -> None:
    """Refuse settings of a config that cannot be honoured.

    Args:
        config: The call's, as given or merged with the model's own.
        own: The checkpoint's. The call did not choose its settings, so its cache and draft settings are ignored: they
            change no token, except a cache that rounds keys and values.
    """
    for name in (*_REFUSED, *_NOT_OURS):
        value = getattr(config, name, None)
        # A quantised cache rounds keys and values, so it would change tokens.
        ignored = name in _NOT_OURS or (name == "cache_implementation" and value != "quantized")
        if not ignored or value != getattr(own, name, None):
            _refuse_mode(name, value)


def _refuse_mode(name: str, value: object) -> None:
    if name in _REFUSED and value not in _REFUSED[name]:
        raise UnsupportedError(f"{name}={value!r} cannot be honoured with exact speculation; leave it out")
    if name in _NOT_OURS and value not in _NOT_OURS[name]:
        raise UnsupportedError(
            f"{name}={value!r} is for transformers' own way of reading prompts and drafting; leave it out: what drafts "
            "here, and how far, is an argument of from_pretrained"
        )


def split_own(arguments: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the arguments in transformers' terms, and those parameters of rows for which it has none."""
    others = {name: value for name, value in arguments.items() if name not in (*_OWN, "logit_bias", "grammar")}
    own = {name: value for name in _OWN if (value := arguments.get(name)) is not None}
    for name, value in own.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    if bias := arguments.get("logit_bias"):
        numbers = isinstance(bias, Mapping) and all(isinstance(x, int | float) and x == x for x in bias.values())
        if not numbers or not all(type(token) is int for token in bias):  # True would be a mask in place of an index
            raise ArgumentError(f"logit_bias is a dict from token ids to numbers, got {bias!r}")
        own["logit_bias"] = bias
    if isinstance(temperature := arguments.get("temperature"), list | tuple | Tensor):
        own["temperature"], others["temperature"] = temperature, 1.0  # for which transformers makes no processor

    def grammar_of(grammar: Any) -> Grammar | None:
        if grammar is None or isinstance(grammar, Grammar):
            return grammar
        if arguments.get("tokenizer") is None:
            raise ArgumentError("grammar needs the tokenizer: pass tokenizer=tokenizer to generate(), or a Grammar")
        return Grammar(grammar, arguments["tokenizer"])

    if (given := arguments.get("grammar")) is not None:
        own["grammar"] = [grammar_of(each) for each in given] if isinstance(given, list | tuple) else grammar_of(given)
    return others, own


def _setting(name: str, arguments: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig) -> Any:
    """Return a setting of a call: its argument, or else that of the call's config, or else that of the model's own."""
    of_config = getattr(config, name, None)
    return arguments[name] if name in arguments else getattr(own, name, None) if of_config is None else of_config


def with_stop_strings(
    arguments: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig
) -> tuple[dict[str, object], GenerationConfig | None]:
    """Return the call's arguments and generation config with stop strings as a criterion.

    transformers looks for the tokenizer where custom decoding never receives it, so the criterion is made here.
    Arguments come before the call's `config`, which is not changed, and that before the model's `own`.
    """
    kept = dict(arguments)
    tokenizer, strings = kept.pop("tokenizer", None), _setting("stop_strings", kept, config, own)
    kept.pop("stop_strings", None)
    # transformers would refuse stop strings of a config without a tokenizer, so they are removed there.
    if _setting("stop_strings", {}, config, own) is not None:
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


def without_cache(
    arguments: Mapping[str, object], config: GenerationConfig | None, own: GenerationConfig
) -> tuple[dict[str, object], GenerationConfig | None]:
    """Return a call's arguments and generation config so that transformers makes no cache, which nobody would read.

    Making one takes almost as long as the rest of the preparation. The call's `config` is not changed. If that, or the
    model's `own`, chooses a kind of cache, it is made, since transformers warns of a choice without effect.
    """
    chosen = [arguments.get("cache_config")]
    chosen += [x for each in (config, own) if each is not None for x in (each.cache_config, each.cache_implementation)]
    if any(x is not None for x in chosen):
        return dict(arguments), config
    if config is None or "use_cache" in arguments:
        return {**arguments, "use_cache": False}, config
    config = copy.copy(config)
    config.use_cache = False
    return dict(arguments), config


def check_shapes(input_ids: object, mask: object) -> Tensor:
    """Return the ids; `ArgumentError` unless they are integers `[B, P]`, at least one, and the mask has their shape."""
    if input_ids is None:
        raise ArgumentError("there is no prompt: pass input_ids")
    if isinstance(input_ids, Mapping):
        raise ArgumentError("write generate(**inputs): two stars pass what the tokenizer returned by name")
    if isinstance(input_ids, str):
        raise ArgumentError('pass ids in place of a text: engine.generate(**tokenizer(text, return_tensors="pt"))')
    if isinstance(input_ids, list | tuple):
        raise ArgumentError("pass input_ids as a tensor: torch.tensor([[...]]), one list for each row")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"input_ids must be an integer tensor [batch, length], got {_shown(input_ids)}")
    if input_ids.numel() == 0:
        raise ArgumentError(f"the prompt is empty: input_ids has shape {tuple(input_ids.shape)}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        message = f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {_shown(mask)}"
        raise ArgumentError(message)
    return input_ids


def _shown(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
