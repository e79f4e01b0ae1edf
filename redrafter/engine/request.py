"""A call of `generate`, checked and turned into tensors.

Hugging Face's own `generate` prepares the call (configs merged, processors and criteria built, sequences expanded), so
that names and meanings are its own. What it prepared is read here; what cannot be honoured is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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

from redrafter.engine.arguments import check_modes
from redrafter.engine.modes import check_processors
from redrafter.engine.options import EngineOptions
from redrafter.engine.prompts import check_ids, check_length, read_mask, read_prepared
from redrafter.errors import ArgumentError
from redrafter.grammar.grammar import Grammar
from redrafter.model.images import ImagePrompt
from redrafter.model.lora import Adapter
from redrafter.model.target import Target
from redrafter.sampling.hf_processors import TemperaturePerRow, fold_rows, index_of_warpers, read_processors
from redrafter.sampling.params import SamplingParams

Seed = int | Sequence[int] | None


def row_seeds(seed: Any, rows: int) -> list[int]:
    """Return a seed per row: s, s+1, ... for an int s, or the values of a sequence; numbers of numpy and torch too.

    For None, s is drawn from torch's CPU generator, so that `torch.manual_seed` makes calls repeatable.
    """
    if seed is None:
        seed = torch.randint(1 << 62, (), device="cpu")
    seed = _in_python(seed)
    if isinstance(seed, int):
        if seed < 1 << 63 < seed + rows:
            raise ArgumentError(
                f"seed={seed} is too large for {rows} output rows, which have it and those that follow: give at most "
                f"{(1 << 63) - rows}, or one per row"
            )
        seeds = [seed + row for row in range(rows)]
    elif isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ArgumentError(f"seed has {len(seed)} entries for {rows} output rows; give one int or one per row")
        seeds = [_in_python(each) for each in seed]
    else:
        seeds = [seed]
    for value in seeds:
        if not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ArgumentError(f"a seed is an int from 0 to 2**63 - 1, got {value!r}")
    return seeds


def _in_python(value: Any) -> Any:
    """Return an array, a tensor or a scalar of one as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


AdapterNames: TypeAlias = str | Sequence[str | None] | None


def row_adapters(adapter: AdapterNames, prompts: int, rows: int) -> list[str | None]:
    """Return the name of each output row's adapter, None for the model alone; each prompt has as many rows.

    Raises:
        ArgumentError: `adapter` is neither a name nor a list, or there are more or fewer names than prompts.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * rows
    if not isinstance(adapter, list | tuple) or not all(isinstance(name, str | None) for name in adapter):
        raise ArgumentError(f"adapter must be a name, or a list of a name or None for each prompt, got {adapter!r}")
    if len(adapter) != prompts:
        raise ArgumentError(f"adapter has {len(adapter)} entries for {prompts} prompts; give one name or one for each")
    return [name for name in adapter for _ in range(rows // prompts)]


def with_temperature(
    processors: LogitsProcessorList, temperature: Any, rows: int, *, sampled: bool
) -> list[LogitsProcessor]:
    """Return the processors of a call with a temperature by row where transformers puts its own.

    `temperature`, if it is not None, is one value or one per output row in place of the config's. Sampling at
    temperature 1 gets a processor too, for which transformers makes none; greedy decoding is given none.
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
    values = torch.as_tensor(temperature, dtype=torch.float64)
    if values.shape != (rows,) or not bool((values > 0).all()):
        raise ArgumentError(
            f"temperature must be positive, one value or one per output row ({rows}); got {temperature}"
        )


class StopConditions(NamedTuple):
    """What ends the texts of a call.

    Attributes:
        max_length: The most tokens of a row, its padding included.
        eos: Ids that end a row.
        deadline: `time.time()` after which no step begins; infinity for none.
        criteria: The other criteria, which are asked token by token on the host.
    """

    max_length: int
    eos: frozenset[int]
    deadline: float
    criteria: list[StoppingCriteria]


def read_criteria(criteria: StoppingCriteriaList, max_length: int) -> StopConditions:
    """Read the criteria that transformers prepared; `max_length` is the one of a call without such a criterion."""
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
    return StopConditions(min(lengths, default=max_length), eos, deadline, others)


MAX_TEXT_TOKENS = 1 << 31  # a longer limit need not fit into an integer of the machine


@dataclass(frozen=True)
class Request:
    """Everything that decoding one call needs.

    Attributes:
        prompts: Each row's own tokens first, `[B, P]` int64.
        lengths: Prompt length of each row.
        limits: The most tokens that each row may come to, prompt included.
        cut_short: Whether a row's limit is the end of the target's context, and the call asked for more.
        eos: Ids that end a row.
        pad_token: Id that fills rows behind their end.
        params: How the tokens of each row are drawn.
        adapters: LoRA adapter of each row, None for the model alone.
        criteria: Stopping criteria that are asked token by token on the host.
        deadline: `time.time()` after which no step begins.
        want_scores: Whether processed scores are recorded.
        want_logits: Whether logits are recorded.
        as_dict: Whether a `GenerateOutput` is returned in place of ids.
        slow_processors: Names of processors that run node by node.
        images: The images of each row's prompt; None for a row without any.
    """

    prompts: Tensor
    lengths: list[int]
    limits: list[int]
    cut_short: list[bool]
    eos: frozenset[int]
    pad_token: int
    params: list[SamplingParams]
    adapters: Sequence[Adapter | None]
    criteria: list[StoppingCriteria]
    deadline: float
    want_scores: bool
    want_logits: bool
    as_dict: bool
    slow_processors: list[str]
    images: list[ImagePrompt | None]

    @property
    def seeds(self) -> list[int] | None:
        """Seed of each row; None when greedy."""
        return None if self.params[0].greedy else [params.seed for params in self.params]


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
    own: Mapping[str, Any],
    adapters: Sequence[Adapter | None] = (),
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
        seed: One int, or one per row; None to draw one from torch's CPU generator.
        temperature: One value per row, in place of the config's; None for the config's.
        own: Parameters of rows for which transformers has no names: numbers for all rows, and `grammar`, one for all
            rows or one or None for each.
        adapters: LoRA adapter of each row, None for the model alone; empty for none at all.

    Raises:
        ArgumentError: For values out of range.
        UnsupportedError: For what cannot be honoured.
    """
    check_modes(config, target.model.generation_config)
    check_ids(input_ids, target)
    seen = read_mask(attention_mask, input_ids)
    images = read_prepared(prepared, input_ids, seen, target)
    if config.num_return_sequences is not None and config.num_return_sequences < 1:
        raise ArgumentError(f"num_return_sequences must be 1 or more, got {config.num_return_sequences}")
    rows, width = input_ids.shape
    length = seen.sum(dim=1)
    check_length(int(length.max()), target.context, options)
    max_length, eos, deadline, others = read_criteria(criteria, config.max_length)
    limit = asked = min(max_length, MAX_TEXT_TOKENS) - (width - length)
    for most in (target.context, options.max_seq_len):
        if most is not None:
            limit = limit.clamp(max=most)
    own_first = (torch.arange(width, device=seen.device) + (width - length)[:, None]) % width  # [B, P]
    check_processors(target, processors)
    given = with_temperature(processors, temperature, rows, sampled=config.do_sample)
    functions, slow = read_processors(given, width=width, prompt=length.cpu(), vocabulary=target.vocab_size)
    params = fold_rows(functions, rows, eos, sampled=config.do_sample)
    drawn: list[dict[str, Any]] = [{"temperature": 0.0}] * rows
    if config.do_sample:
        drawn = [{"seed": each} for each in target.ranks.from_first(row_seeds(seed, rows))]
    want_scores = bool(config.return_dict_in_generate and config.output_scores)
    return Request(
        prompts=input_ids.long().gather(1, own_first),
        lengths=length.tolist(),
        limits=limit.tolist(),
        cut_short=[target.context == most < more for most, more in zip(limit.tolist(), asked.tolist(), strict=True)],
        eos=eos,
        pad_token=_pad_token(config, eos),
        params=[
            SamplingParams(**row | draw | dict(own) | {"grammar": grammar}, stop_token_ids=eos)
            for row, draw, grammar in zip(params, drawn, _grammars(own.get("grammar"), rows), strict=True)
        ],
        adapters=adapters or [None] * rows,
        criteria=others,
        deadline=deadline,
        want_scores=want_scores,
        want_logits=bool(config.return_dict_in_generate and config.output_logits),
        as_dict=bool(config.return_dict_in_generate),
        slow_processors=slow,
        images=images,
    )


def _grammars(given: Any, rows: int) -> Sequence[Grammar | None]:
    """Return each row's grammar, whose process is there for a new text."""
    grammars = given if isinstance(given, list) else [given] * rows
    if len(grammars) != rows:
        raise ArgumentError(f"grammar has {len(grammars)} entries for {rows} output rows; give one, or one per row")
    for grammar in grammars:
        if grammar is not None:
            grammar.restore()
    return grammars


def _pad_token(config: GenerationConfig, eos: frozenset[int]) -> int:
    """Return what fills rows behind their end: as in transformers, the first EOS id where the config has no pad id."""
    for given in (config.pad_token_id, config.eos_token_id):
        if given is not None and (ids := torch.as_tensor(given).flatten().tolist()):
            return ids[0]
    return min(eos, default=0)
