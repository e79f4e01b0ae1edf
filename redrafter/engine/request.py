"""A call of `generate`, checked and turned into tensors.

Hugging Face's own `generate` prepares the call (configs merged, processors and criteria built, sequences expanded), so
that names and meanings are its own. What it prepared is read here; what cannot be honoured is refused by name.
"""

import difflib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from redrafter.engine.model_inputs import check_prepared
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.grammar.grammar import Grammar
from redrafter.sampling.grammar_masks import GrammarProcessor
from redrafter.sampling.hf_processors import TemperaturePerRow, TokenPenalties, index_of_warpers, read_processors
from redrafter.sampling.processors import Processor, RowTemperature
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target

__all__ = [
    "Request",
    "check_arguments",
    "check_shapes",
    "known_arguments",
    "read_request",
    "with_grammar",
    "with_openai_arguments",
]

Seed = int | Sequence[int] | None

MAX_TEXT_TOKENS = 1 << 31  # a longer limit need not fit into an integer of the machine

# Arguments of `model.generate` that are not in its GenerationConfig and are honoured here.
CALL_ARGUMENTS = frozenset(
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


@dataclass(frozen=True)
class Request:
    """Everything that decoding one call needs.

    Attributes:
        prompts: Each row's own tokens first, `[B, P]` int64.
        length: Prompt length of each row, `[B]` int64.
        lengths: `length` on the host.
        limits: The most tokens that each row may come to, prompt included.
        cut_short: Whether a row's limit is the end of the target's context, and the call asked for more.
        eos: Ids that end a row.
        pad_token: Id that fills rows behind their end.
        sampler: How tokens are drawn.
        seeds: Seed of each row; None when greedy.
        criteria: Stopping criteria that are asked token by token on the host.
        deadline: `time.time()` after which no step begins.
        want_scores: Whether processed scores are recorded.
        want_logits: Whether logits are recorded.
        as_dict: Whether a `GenerateOutput` is returned in place of ids.
        slow_processors: Names of processors that run node by node.
    """

    prompts: Tensor
    length: Tensor
    lengths: list[int]
    limits: list[int]
    cut_short: list[bool]
    eos: frozenset[int]
    pad_token: int
    sampler: Sampler
    seeds: list[int] | None
    criteria: list[StoppingCriteria]
    deadline: float
    want_scores: bool
    want_logits: bool
    as_dict: bool
    slow_processors: list[str]


def known_arguments() -> set[str]:
    """Return the names that `generate` has a meaning for."""
    return set(GenerationConfig().to_dict()) | CALL_ARGUMENTS | set(OPENAI_ARGUMENTS)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that are unknown, and those that cannot be honoured."""
    known = known_arguments()
    for name, value in arguments.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"generate() has no argument {name!r}{hint}")
        _refuse_mode(name, value)


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


def _refuse_mode(name: str, value: Any) -> None:
    if name in _REFUSED and value not in _REFUSED[name]:
        raise UnsupportedError(f"{name}={value!r} cannot be honoured with exact speculation; leave it out")


def _check_modes(config: GenerationConfig, own: GenerationConfig) -> None:
    """Refuse what a prepared config asks for and cannot be honoured.

    Args:
        config: The call's, with the model's own merged into it.
        own: The checkpoint's, whose choice of a cache nobody made in the call. It is ignored where it changes no token,
            as only a cache that rounds keys and values does.
    """
    for name in _REFUSED:
        value = getattr(config, name, None)
        if name == "cache_implementation" and value == own.cache_implementation != "quantized":
            continue
        _refuse_mode(name, value)


def check_shapes(input_ids: Any, mask: Any) -> None:
    """Raise `ArgumentError` unless the ids are integers `[B, P]`, at least one, and the mask has their shape."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"input_ids must be an integer tensor [batch, length], got {_shown(input_ids)}")
    if input_ids.numel() == 0:
        raise ArgumentError(f"the prompt is empty: input_ids has shape {tuple(input_ids.shape)}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ArgumentError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {_shown(mask)}"
        )


def _check_ids(input_ids: Tensor, target: Target) -> None:
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= target.vocab_size:
        bad = low if low < 0 else high
        raise ArgumentError(f"token id {bad} is out of range: the target's vocabulary has {target.vocab_size} ids")


def _read_mask(mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return where tokens are, `[B, P]` bool; `ArgumentError` unless each row is left-padded and has a token."""
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    seen = mask.bool()
    if not bool(seen.any(dim=1).all()):
        raise ArgumentError(f"row {int((~seen.any(dim=1)).nonzero()[0])} of attention_mask has no token: empty prompt")
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise ArgumentError("attention_mask is not left-padded; set tokenizer.padding_side = 'left'")
    return seen


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def read_request(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    prepared: Mapping[str, Any],
    *,
    options: EngineOptions,
    seed: Seed,
    temperature: Any,
) -> Request:
    """Turn what Hugging Face prepared into a `Request`.

    Args:
        target: The model that is to continue the prompts.
        input_ids: Prompts, `[B, P]` integer, left-padded.
        attention_mask: 1 at tokens and 0 at padding, `[B, P]`; None where no row is padded.
        config: The generation config of the call.
        processors: Logits processors.
        criteria: Stopping criteria.
        prepared: What else would have been given to the model, by name.
        options: Limits of lengths.
        seed: One int, or one per row; None for fresh ones.
        temperature: One value per row, in place of the config's; None for the config's.

    Raises:
        ArgumentError: For values out of range.
        UnsupportedError: For what cannot be honoured.
    """
    _check_modes(config, target.model.generation_config)
    _check_ids(input_ids, target)
    seen = _read_mask(attention_mask, input_ids)
    check_prepared(prepared, seen, target.model)
    if config.num_return_sequences is not None and config.num_return_sequences < 1:
        raise ArgumentError(f"num_return_sequences must be 1 or more, got {config.num_return_sequences}")
    rows, width = input_ids.shape
    length = seen.sum(dim=1)
    _check_length(int(length.max()), target.context, options)
    max_length, eos, deadline, others = _read_criteria(criteria, config.max_length)
    limit = asked = min(max_length, MAX_TEXT_TOKENS) - (width - length)
    for most in (target.context, options.max_seq_len):
        if most is not None:
            limit = limit.clamp(max=most)
    own_first = (torch.arange(width, device=seen.device) + (width - length)[:, None]) % width  # [B, P]
    seeds = _row_seeds(seed, rows) if config.do_sample else None
    processors = LogitsProcessorList(
        processor.of_request(rows, eos) if isinstance(processor, GrammarProcessor) else processor
        for processor in processors
    )
    given = _with_temperature(processors, temperature, rows, sampled=config.do_sample)
    functions, slow = read_processors(given, width=width, prompt=length.to(target.device), vocabulary=target.vocab_size)
    want_scores = bool(config.return_dict_in_generate and config.output_scores)
    return Request(
        prompts=input_ids.long().gather(1, own_first),
        length=length,
        lengths=length.tolist(),
        limits=limit.tolist(),
        cut_short=[target.context == most < more for most, more in zip(limit.tolist(), asked.tolist(), strict=True)],
        eos=eos,
        pad_token=_pad_token(config, eos),
        sampler=Sampler(
            seeds=None if seeds is None else torch.tensor(seeds, device=target.device),
            processors=tuple(functions),
            temperature=_divisor(functions, rows, target.device),
            prompt=length,
            limit=limit,
            ids=torch.arange(target.vocab_size, device=target.device),
            keep_scores=want_scores,
        ),
        seeds=seeds,
        criteria=others,
        deadline=deadline,
        want_scores=want_scores,
        want_logits=bool(config.return_dict_in_generate and config.output_logits),
        as_dict=bool(config.return_dict_in_generate),
        slow_processors=slow,
    )


def _with_temperature(
    processors: LogitsProcessorList, temperature: Any, rows: int, *, sampled: bool
) -> list[LogitsProcessor]:
    """Return the processors with a temperature by row where transformers puts its own.

    Sampling at temperature 1, for which transformers makes no processor, gets one too, which changes no score: it is
    then of one kind with sampling at other temperatures, and shares captured steps. Greedy decoding is given none.

    Args:
        processors: What transformers prepared.
        temperature: One value, or one per output row, in place of the config's; None for the config's.
        rows: Number of output rows.
        sampled: Whether tokens are sampled.
    """
    if temperature is not None:
        _check_temperatures(temperature, rows)
    given = list(processors)
    for processor in given:
        if isinstance(processor, TemperaturePerRow):
            _check_temperatures(processor.temperature, rows)
    if not sampled:
        given = [processor for processor in given if not isinstance(processor, TemperaturePerRow)]
    kinds = (TemperatureLogitsWarper, TemperaturePerRow)
    places = [index for index, processor in enumerate(given) if type(processor) in kinds]
    if temperature is not None and places:
        given[places[0]] = TemperaturePerRow(temperature)
    elif sampled and not places:
        values = torch.ones(rows) if temperature is None else temperature
        given.insert(index_of_warpers(given), TemperaturePerRow(values))
    return given


def _check_temperatures(temperature: Any, rows: int) -> None:
    values = torch.as_tensor(temperature, dtype=torch.float32)
    if values.shape != (rows,) or not bool((values > 0).all()):
        raise ArgumentError(
            f"temperature must be positive, one value or one per output row ({rows}); got {temperature}"
        )


def _divisor(processors: Sequence[Processor], rows: int, device: torch.device) -> Tensor:
    """Return what scores are divided by altogether, `[B]` float32."""
    divisor = torch.ones(rows, device=device)
    for processor in processors:
        if isinstance(processor, RowTemperature):
            divisor = divisor * processor.temperature
    return divisor


def _check_length(longest: int, context: int | None, options: EngineOptions) -> None:
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


def _read_criteria(
    criteria: StoppingCriteriaList, default: int
) -> tuple[int, frozenset[int], float, list[StoppingCriteria]]:
    """Return the length, the end tokens and the deadline, which the loop keeps to, and the other criteria."""
    lengths, eos, deadline = list[int](), frozenset[int](), float("inf")
    others = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos |= set(criterion.eos_token_id.tolist())
        elif type(criterion) is MaxTimeCriteria:
            deadline = min(deadline, criterion.initial_timestamp + criterion.max_time)
        else:
            others.append(criterion)
    return min(lengths, default=default), eos, deadline, others


def _pad_token(config: GenerationConfig, eos: frozenset[int]) -> int:
    """Return what fills rows behind their end: as in transformers, the first EOS id where the config has no pad id."""
    for given in (config.pad_token_id, config.eos_token_id):
        if given is not None and (ids := torch.as_tensor(given).flatten().tolist()):
            return ids[0]
    return min(eos, default=0)


def _row_seeds(seed: Seed, rows: int) -> list[int]:
    """Return a seed per row: s, s+1, ... for an int s, the values of a list, fresh ones for None."""
    if seed is None:
        return [secrets.randbits(62) for _ in range(rows)]
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ArgumentError(f"seed has {len(seed)} entries for {rows} output rows; give one int or one per row")
        seeds = list(seed)
    else:
        seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else [seed]
    for value in seeds:
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ArgumentError(f"a seed is an int from 0 to 2**63 - 1, got {value!r}")
    return seeds
