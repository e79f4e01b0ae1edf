"""A call of `generate`, checked and turned into tensors.

Hugging Face's own `generate` prepares the call (configs merged, processors and criteria built, sequences expanded), so
that names and meanings are its own. This module reads the result, and refuses unsupported settings by name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from redrafter.engine.arguments import AdapterNames, DraftLimits, PreparedCall, check_modes
from redrafter.engine.model_inputs import read_prepared
from redrafter.engine.modes import check_processors
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar
from redrafter.model.lora import Adapter
from redrafter.model.target import Target
from redrafter.sampling.hf_processors import SMALLEST_TEMPERATURE, fold_rows, read_processors
from redrafter.sampling.params import SamplingParams
from redrafter.scheduler.request import GenerationRequest, check_draft_limit

MAX_TEXT_TOKENS = 1 << 31  # longer limits are cut here, as they need not fit into a 64-bit integer


def by_row(name: str, given: Any, rows: int, of: str = "output rows") -> Sequence[Any]:
    """Return an argument's value for each row: the entries of a sequence, which must be `rows`, or one for all."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * rows
    if len(given) != rows:
        raise ArgumentError(f"{name} has {len(given)} entries for {rows} {of}; give one, or one for each")
    return given


def row_seeds(seed: Any, rows: int) -> list[int]:
    """Return a seed per row: s, s+1, ... for an int s, or the values of a sequence; also numbers of numpy and torch.

    For None, s is drawn from torch's CPU generator, so that `torch.manual_seed` makes calls reproducible.
    """

    def in_python(value: object) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    seed = in_python(torch.randint(1 << 62, (), device="cpu") if seed is None else seed)
    if isinstance(seed, int) and seed < 1 << 63 < seed + rows:
        raise ArgumentError(
            f"seed={seed} is too large for {rows} output rows, which use it and the numbers after it: give at most "
            f"{(1 << 63) - rows}, or one per row"
        )
    given = [seed + row for row in range(rows)] if isinstance(seed, int) else seed
    seeds = [in_python(each) for each in by_row("seed", given, rows)]
    for value in seeds:
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ArgumentError(f"a seed is an int from 0 to 2**63 - 1, got {value!r}")
    return seeds


def row_draft_limits(given: DraftLimits, rows: int, *, speculate: bool) -> Sequence[int | None]:
    """Return the most drafts that a step of each output row may accept; None for no limit."""
    limits = by_row("num_speculative_tokens", given, rows)
    for limit in limits:
        if limit is not None and type(limit) is not int:
            raise ArgumentError(f"num_speculative_tokens is an int or one per output row, got {limit!r}")
        if not speculate:
            check_draft_limit(limit, depth=0)
    return limits if speculate else [0] * rows


def row_adapters(adapter: AdapterNames, prompts: int, rows: int) -> list[str | None]:
    """Return the name of each output row's adapter, None for the model alone; each prompt has the same number of rows.

    Raises:
        ArgumentError: `adapter` is neither a name nor a list, or there are more or fewer names than prompts.
    """
    names = by_row("adapter", adapter, prompts, "prompts")
    if not all(isinstance(name, str | None) for name in names):
        raise ArgumentError(f"adapter must be a name, or a list of a name or None for each prompt, got {adapter!r}")
    return [name for name in names for _ in range(rows // prompts)]


def row_temperatures(given: Sequence[float] | Tensor, rows: int) -> list[float]:
    """Return the temperature of each output row; `ArgumentError` unless there is a positive one for each."""
    try:
        values = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError):  # words in place of numbers, or lists of several lengths
        values = torch.empty(0)
    if values.shape != (rows,) or not bool((values > 0).all()):
        raise ArgumentError(f"temperature must be positive, one value or one per output row ({rows}); got {given}")
    return values.clamp(min=SMALLEST_TEMPERATURE).tolist()


@dataclass(frozen=True)
class CallRequest:
    """All inputs of decoding one call."""

    input_ids: Tensor  # left-padded prompts on the host, `[B, P]`
    rows: Sequence[GenerationRequest]  # in their order
    device: torch.device  # device of the returned ids
    cut_short: Sequence[bool] = ()  # whether a row's limit is the end of the target's context, before the requested one
    pad_token: int = 0  # fills rows after their end
    criteria: Sequence[StoppingCriteria] = ()  # called for each token on the host
    deadline: float = float("inf")  # `time.time()` after which no step begins
    keeps: frozenset[str] = frozenset()  # which of "scores" (processed) and "logits" are returned
    as_dict: bool = True  # whether a `GenerateOutput` is returned in place of ids
    slow_processors: Sequence[str] = ()  # names of processors that run node by node


def read_request(
    target: Target,
    options: EngineOptions,
    call: PreparedCall,
    adapters: Sequence[Adapter | None],
    *,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    attention_mask: Tensor | None = None,
    **prepared: object,
) -> CallRequest:
    """Turn a call prepared by Hugging Face into a `CallRequest`; `prepared` are the model's other inputs.

    Raises:
        ArgumentError: For values out of range.
        UnsupportedError: For unsupported settings.
    """
    config, sampled = generation_config, generation_config.do_sample
    check_modes(config, target.model.generation_config)
    # A GPU is asked for ids and mask once, instead of for each number that follows from them.
    own, ids = call.own, call.input_ids.cpu()
    mask = None if attention_mask is None else attention_mask.cpu()
    seen = read_mask(ids, mask)
    images = read_prepared(prepared, ids, seen, target)
    if config.num_return_sequences is not None and config.num_return_sequences < 1:
        raise ArgumentError(f"num_return_sequences must be 1 or more, got {config.num_return_sequences}")
    rows, width = ids.shape
    length = seen.sum(dim=1)

    # Criteria that end a row.
    eos, deadline = frozenset[int](), float("inf")
    lengths, criteria = list[int](), list[StoppingCriteria]()
    # Criteria that a step can evaluate on the device become limits and end tokens; others run on the host.
    for criterion in stopping_criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            # An id that the model lacks is never drawn, and is no index of its logits.
            eos |= {token for token in criterion.eos_token_id.tolist() if 0 <= token < target.vocab_size}
        elif type(criterion) is MaxTimeCriteria:
            if not isinstance(criterion.max_time, int | float):
                raise ArgumentError(f"max_time is a number of seconds, got {criterion.max_time!r}")
            deadline = min(deadline, criterion.initial_timestamp + criterion.max_time)
        else:
            criteria.append(criterion)
    max_length = min(lengths, default=config.max_length)
    counts = length.tolist()
    # `max_length` counts the padded prompt, and a row's own limit must not depend on the other rows.
    # A limit that is no whole number, such as 1e3, ends a row with the first token past it, as in transformers.
    asked = [math.ceil(min(max_length, MAX_TEXT_TOKENS)) - (width - count) for count in counts]
    most = min((x for x in (target.context, options.max_seq_len) if x is not None), default=MAX_TEXT_TOKENS)
    limits = [min(tokens, most) for tokens in asked]

    # How tokens are drawn.
    check_processors(target, logits_processor)
    given = list(logits_processor)
    if sampled and call.temperature is not None and config.temperature not in (None, 1.0):  # which the call's replace
        last = max((at for at, each in enumerate(given) if type(each) is TemperatureLogitsWarper), default=len(given))
        del given[last : last + 1]
    functions, slow = read_processors(
        given, width=width, prompt=length, vocabulary=target.vocab_size, min_new_tokens=config.min_new_tokens
    )
    folded = fold_rows(functions, rows, eos, sampled=sampled)
    if call.temperature is not None:
        if not sampled:
            raise ArgumentError("a temperature for each row is for sampling: add do_sample=True, or leave it out")
        for row, temperature in zip(folded, row_temperatures(call.temperature, rows), strict=True):
            row["temperature"] = row.get("temperature", 1.0) * temperature
    shared = dict(call.params)
    if bias := shared.pop("logit_bias", None):
        known = folded[0].get("logit_bias", {})
        shared["logit_bias"] = known | {token: known.get(token, 0.0) + value for token, value in bias.items()}
    drawn: list[dict[str, object]] = [{"temperature": 0.0}] * rows
    if sampled:
        drawn = [{"seed": each} for each in target.ranks.from_first(row_seeds(own.seed, rows))]
    grammars = _grammars(call.params.get("grammar"), rows)
    drafts = row_draft_limits(own.num_speculative_tokens, rows, speculate=own.speculate)
    params = [
        SamplingParams(**row | draw | shared | {"grammar": grammar}, num_speculative_tokens=limit, stop_token_ids=eos)
        for row, draw, grammar, limit in zip(folded, drawn, grammars, drafts, strict=True)
    ]
    recorded = {"scores": config.output_scores, "logits": config.output_logits}
    as_dict = bool(config.return_dict_in_generate)
    keeps = frozenset(name for name, wanted in recorded.items() if wanted and as_dict)
    requests = [
        GenerationRequest(prompt[width - n :], limit - n, with_params, adapter=adapter, keeps=keeps, images=shown)
        for prompt, n, limit, with_params, adapter, shown in zip(
            ids.tolist(), counts, limits, params, adapters, images, strict=True
        )
    ]
    return CallRequest(
        ids,
        requests,
        device=call.input_ids.device if call.device is None else call.device,
        cut_short=[target.context == most < more for most, more in zip(limits, asked, strict=True)],
        pad_token=_pad_token(config, eos),
        criteria=criteria,
        deadline=deadline,
        keeps=keeps,
        as_dict=as_dict,
        slow_processors=slow,
    )


def _grammars(given: Any, rows: int) -> Sequence[Grammar | None]:
    """Return each row's grammar. Restarts the process of a grammar if it has ended."""
    grammars = by_row("grammar", given, rows)
    for grammar in grammars:
        if grammar is not None:
            grammar.restore()
    return grammars


def _pad_token(config: GenerationConfig, eos: frozenset[int]) -> int:
    """Return the id that pads ended rows: as in transformers, the first EOS id where the config has no pad id."""
    for given in (config.pad_token_id, config.eos_token_id):
        if given is not None and (ids := torch.as_tensor(given).flatten().tolist()):
            return ids[0]
    return min(eos, default=0)


def read_mask(input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return where prompts have tokens, `[B, P]` bool; `ArgumentError` for rows that are empty or not left-padded."""
    if mask is None or bool((mask := mask.bool()).all()):
        return torch.ones_like(input_ids, dtype=torch.bool)
    if not bool(mask.any(dim=1).all()):
        row = int((~mask.any(dim=1)).nonzero()[0])
        raise ArgumentError(f"row {row} of attention_mask has no token: empty prompt")
    # A token followed by padding means right padding.
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ArgumentError("attention_mask is not left-padded; set tokenizer.padding_side = 'left'")
    return mask
