"""Check the arguments of `generate`: options, prompts, and further inputs of a model.

Arguments are known, or refused by name, and translated to transformers' names. Models with an encoder in addition to
their decoder receive its inputs in every call, from transformers' `generate` or from a processor, and some take a
position for each axis of an image. For text alone, these inputs add nothing to ids and mask. Images are taken by models
that accept encoded images; any other input is rejected by name.
"""

import copy
import difflib
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from redrafter.cache.dense import CACHE_NAMES, cache_in
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.grammar.grammar import Grammar
from redrafter.model.images import ImagePrompt, marks_tokens, split_rows, to_model
from redrafter.model.target import Target
from redrafter.sampling.hf_processors import TemperaturePerRow
from redrafter.sampling.params import NUMBERS

# Arguments of `model.generate` that are not in its GenerationConfig and are honoured here.
_CALL_ARGUMENTS = frozenset(
    {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "tokenizer", "grammar"}
)

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

# Arguments of `model.generate` that have no meaning here: the values that wrappers pass on by habit and that ask for
# nothing, and what to do instead where another value was given.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "inputs_embeds": ((None,), "pass input_ids and attention_mask"),
    **dict.fromkeys(CACHE_NAMES, ((None,), "pass the whole text as input_ids")),
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

# Methods of models that an engine lacks: the argument of `from_pretrained` in their place.
_AT_LOADING = {
    **dict.fromkeys(("to", "cuda", "cpu"), "device=... and dtype=..."),
    **dict.fromkeys(("half", "float", "bfloat16"), "dtype=..."),
}

# Inputs of the loop in transformers, which this library's loop does not need.
_LOOP = frozenset({*CACHE_NAMES, "use_cache", "cache_position", "logits_to_keep"})


def check_parts(engine: type, parts: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Refuse arguments that do not fit the signature of an engine's constructor, such as a model alone."""
    try:
        inspect.signature(engine.__init__).bind(None, *parts, **keywords)  # type: ignore[misc]
    # A call such as ReDrafter("my-base") is the likeliest mistake, so the error contains the call that works.
    except TypeError as error:
        typed = [repr(part) if isinstance(part, str) else "model" for part in parts]
        typed += [f"{name}=..." for name in keywords]
        raise ArgumentError(
            f"{engine.__name__}() takes parts that are loaded and bound: {error}; to load a model, write "
            f"{_loader(engine)}({', '.join(typed) or 'model'})"
        ) from None


def missing_attribute(engine: str, name: str) -> str:
    """Return the message for an attribute of models that an engine lacks, with what to write instead."""
    instead = "for a pipeline, give engine.model and call it with custom_generate=engine.custom_generate()"
    if name in _AT_LOADING:
        instead = f"give {_AT_LOADING[name]} to from_pretrained"
    elif name in ("eval", "train"):
        instead = "leave the call out, as an engine never trains"
    elif name == "tokenizer":
        instead = "load one with AutoTokenizer.from_pretrained(model)"
    elif name in ("config", "generation_config", "dtype", "parameters", "save_pretrained"):
        instead = f"write engine.model.{name}"
    return f"{engine!r} object has no attribute {name!r}, since it is not a model of transformers: {instead}"


def check_bound(engine: type, given: object, kind: Any) -> None:
    """Refuse a part that the constructor of an engine does not take and its `from_pretrained` may."""
    if not isinstance(given, kind):
        shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        raise ArgumentError(
            f"{engine.__name__}() takes parts that are loaded and bound, not {shown}; "
            f"{_loader(engine)} takes names, directories and models of transformers"
        )


def check_lengths(options: EngineOptions, context: int | None) -> None:
    """Raise `ArgumentError` for lengths above the model's context, which would be cut to it."""
    for name in ("max_input_len", "max_seq_len"):
        length: int | None = getattr(options, name)
        if length is not None and context is not None and length > context:
            raise ArgumentError(f"{name} is {length}, and the model's context is {context}: give {context} at most")


def _loader(engine: type) -> str:
    """Return the name of the function that loads an engine; the base class of all engines has none."""
    return f"{engine.__name__ if hasattr(engine, 'from_pretrained') else 'ReDrafter'}.from_pretrained"


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
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"generate() has no argument {name!r}{hint}")
        _refuse_mode(name, value)
    return kept


@functools.cache
def _known() -> frozenset[str]:
    return _CALL_ARGUMENTS.union(GenerationConfig().to_dict(), _OWN, ("inputs", "logit_bias"))


@functools.cache
def _never_inputs() -> frozenset[str]:
    # Types of tokens carry no information about text, but mark the images in it.
    return _known() | (_NEUTRAL.keys() - {"token_type_ids"})


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


def split_own(arguments: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the arguments in transformers' terms, and those parameters of rows for which it has none.

    Temperatures of rows become a logits processor.
    """
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
    if isinstance(temperature := arguments.get("temperature"), list | tuple | Tensor):
        # Placed last among the user's own, where transformers would put a temperature. It makes none for 1.
        processors = [*(arguments.get("logits_processor") or []), TemperaturePerRow(temperature)]
        others |= {"temperature": 1.0, "logits_processor": LogitsProcessorList(processors)}

    def read_grammar(grammar: Any) -> Grammar | None:
        if grammar is None or isinstance(grammar, Grammar):
            return grammar
        if arguments.get("tokenizer") is None:
            raise ArgumentError("grammar needs the tokenizer: pass tokenizer=tokenizer to generate(), or a Grammar")
        return Grammar.of(grammar, arguments["tokenizer"])

    if (given := arguments.get("grammar")) is not None:
        own["grammar"] = (
            [read_grammar(each) for each in given] if isinstance(given, list | tuple) else read_grammar(given)
        )
    return others, own


def with_stop_strings(
    arguments: Mapping[str, Any], config: GenerationConfig | None, own: GenerationConfig
) -> tuple[dict[str, object], GenerationConfig | None]:
    """Return the call's arguments and generation config with stop strings as a criterion.

    transformers looks for the tokenizer where custom decoding never receives it, so the criterion is made here.
    Arguments come before the call's `config`, which is not changed, and that before the model's `own`.
    """
    kept = dict(arguments)
    tokenizer = kept.pop("tokenizer", None)
    given = [c.stop_strings for c in (config, own) if c is not None and c.stop_strings is not None]
    strings = kept.pop("stop_strings") if "stop_strings" in kept else next(iter(given), None)
    # transformers would refuse stop strings of a config without a tokenizer, so they are removed there.
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
        raise ArgumentError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {_shown(mask)}"
        )
    return input_ids


def _shown(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_ids(input_ids: Tensor, mask: Tensor | None, target: Target, options: EngineOptions) -> Tensor:
    """Check prompts of the right shape, and return where they have tokens, `[B, P]` bool.

    Raises:
        ArgumentError: An id is not in the target's vocabulary, a row is not left-padded or has no token, or the longest
            row leaves no room for new tokens.
    """
    # One reduction and one copy to the host for both bounds.
    low, high = (int(x) for x in input_ids.aminmax())
    # On a GPU an id out of range would end the process with a device assertion.
    if low < 0 or high >= target.vocab_size:
        bad = low if low < 0 else high
        raise ArgumentError(f"token id {bad} is out of range: the target's vocabulary has {target.vocab_size} ids")
    seen = torch.ones_like(input_ids, dtype=torch.bool)
    longest = input_ids.shape[1]
    if mask is not None and not bool((mask := mask.bool()).all()):
        seen, longest = mask, int(mask.sum(dim=1).max())
        if not bool(seen.any(dim=1).all()):
            row = int((~seen.any(dim=1)).nonzero()[0])
            raise ArgumentError(f"row {row} of attention_mask has no token: empty prompt")
        # A token followed by padding means right padding.
        if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
            raise ArgumentError("attention_mask is not left-padded; set tokenizer.padding_side = 'left'")
    context = target.context
    if context is not None and longest >= context:
        raise ArgumentError(
            f"the prompt has {longest} tokens and the target's context is {context}: no room is left to write; "
            "shorten the prompt"
        )
    if options.max_input_len is not None and longest > options.max_input_len:
        raise ArgumentError(
            f"the prompt has {longest} tokens and max_input_len is {options.max_input_len}: shorten it, or raise that"
        )
    if options.max_seq_len is not None and longest >= options.max_seq_len:
        raise ArgumentError(
            f"the prompt has {longest} tokens and max_seq_len is {options.max_seq_len}: no room is left to write; "
            "shorten it, or raise that"
        )
    return seen


def separate_inputs(arguments: Mapping[str, object], target: Target) -> tuple[dict[str, Any], dict[str, object]]:
    """Separate the inputs of the model, which its forward names, from the other arguments of a call.

    Returns:
        The other arguments; and the images with their types of tokens, on the model's device. Empty inputs, as
        processors return them for text without images, are in neither.

    Raises:
        UnsupportedError: Naming an input that is no image, or images that cannot be taken.
    """
    model, known = target.model, _never_inputs()
    # The usual call has no inputs of the model, and inspecting a signature takes long.
    if arguments.keys() <= known:
        return dict(arguments), {}
    inputs = (inspect.signature(model.forward).parameters.keys() | target.image_arguments) - known
    given = {name: value for name, value in arguments.items() if name in inputs and not _is_empty(value)}
    images = {name: value for name, value in given.items() if name in target.image_arguments}
    if images and target.images.ok:
        images |= {name: value for name, value in given.items() if marks_tokens(name, model)}
    for name in sorted(given.keys() - images.keys()):
        _check_empty(name, given[name], model)
    if images:
        target.images.check()
    others = {name: value for name, value in arguments.items() if name not in inputs}
    return others, {name: to_model(value, target.device) for name, value in images.items()}


def read_prepared(
    prepared: Mapping[str, Any], input_ids: Tensor, seen: Tensor, target: Target
) -> list[ImagePrompt | None]:
    """Return the images of each row, None for a row without any, from the inputs that transformers has prepared.

    `prepared` are the inputs of the model in addition to ids and mask; `seen` is False where a row is padded,
    `[B, P]`.

    Raises:
        ArgumentError: The images do not fit the prompts.
        UnsupportedError: An input adds information to the ids, their mask and images.
    """
    past, positions = cache_in(prepared), prepared.get("position_ids")
    if past is not None and past.get_seq_length() > 0:
        raise UnsupportedError("past_key_values cannot be continued from; pass the whole text as input_ids")
    images = split_rows(prepared, input_ids, seen, target.model)
    of_images = {"position_ids"}
    if any(images):
        target.images.check()
    of_images |= {name for row in images if row is not None for name in row.inputs}
    # Rows with images have multimodal positions, which `split_rows` has checked.
    text = torch.tensor([row is None for row in images])
    if positions is not None and not _count_tokens(positions.to(seen.device), seen, text):
        raise UnsupportedError("position_ids of your own cannot be honoured; leave them out")
    for name in sorted(prepared.keys() - _LOOP - of_images):
        _check_empty(name, prepared[name], target.model)
    return images


def _check_empty(name: str, value: object, model: PreTrainedModel) -> None:
    if not (_is_empty(value) or (marks_tokens(name, model) and isinstance(value, Tensor) and not value.any())):
        taken = "pass text, as input_ids and attention_mask, with images at most"
        raise UnsupportedError(f"generate() does not take {name}; {taken}")


def _count_tokens(positions: Tensor, seen: Tensor, rows_of_text: Tensor) -> bool:
    """Return whether positions count tokens from 0 in each row of text, ignoring padding.

    Positions are `[B, P]`, or `[A, B, P]` with one position per axis, which are equal for text; B may be 1 for all.
    """
    rows, width = seen.shape
    if positions.dim() not in (2, 3) or positions.shape[-1] != width or positions.shape[-2] not in (1, rows):
        return False
    counted = seen.cumsum(dim=1) - 1  # [B, P]
    if torch.equal(positions, counted):  # as they are where no row is padded
        return True
    return bool(((positions == counted) | ~(seen & rows_of_text[:, None])).all())


def _is_empty(value: object) -> bool:
    """Return whether an input is empty, as the encoding of no image is."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(_is_empty, value)))
