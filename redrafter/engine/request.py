"""A call of `generate`, checked and turned into tensors.

Hugging Face's own `generate` prepares the call (configs merged, processors and criteria built, sequences expanded), so
that names and meanings are its own. What it prepared is read here; what cannot be honoured is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from redrafter.engine.argument_checks import check_modes
from redrafter.engine.batch_invariance import check_processors
from redrafter.engine.model_inputs import read_prepared
from redrafter.engine.options import EngineOptions
from redrafter.engine.prompt_checks import check_ids, check_length, read_mask
from redrafter.engine.row_seeds import Seed, row_seeds
from redrafter.engine.row_temperatures import temperature_divisor, with_temperature
from redrafter.engine.stop_conditions import read_criteria
from redrafter.errors import ArgumentError
from redrafter.sampling.grammar_masks import GrammarProcessor
from redrafter.sampling.hf_processors import read_processors
from redrafter.sampling.sampler import Sampler
from redrafter.target.adapter_slots import Adapter
from redrafter.target.images import ImagePrompt
from redrafter.target.target import Target

__all__ = ["Request", "read_request"]

MAX_TEXT_TOKENS = 1 << 31  # a longer limit need not fit into an integer of the machine


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
    length: Tensor
    lengths: list[int]
    limits: list[int]
    cut_short: list[bool]
    eos: frozenset[int]
    pad_token: int
    sampler: Sampler
    seeds: list[int] | None
    adapters: Sequence[Adapter | None]
    criteria: list[StoppingCriteria]
    deadline: float
    want_scores: bool
    want_logits: bool
    as_dict: bool
    slow_processors: list[str]
    images: list[ImagePrompt | None]


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
    seeds = target.ranks.from_first(row_seeds(seed, rows)) if config.do_sample else None
    processors = LogitsProcessorList(
        processor.of_request(rows, eos) if isinstance(processor, GrammarProcessor) else processor
        for processor in processors
    )
    check_processors(target, processors)
    given = with_temperature(processors, temperature, rows, sampled=config.do_sample)
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
            temperature=temperature_divisor(functions, rows, target.device),
            prompt=length,
            limit=limit,
            ids=torch.arange(target.vocab_size, device=target.device),
            keep_scores=want_scores,
        ),
        seeds=seeds,
        adapters=adapters or [None] * rows,
        criteria=others,
        deadline=deadline,
        want_scores=want_scores,
        want_logits=bool(config.return_dict_in_generate and config.output_logits),
        as_dict=bool(config.return_dict_in_generate),
        slow_processors=slow,
        images=images,
    )


def _pad_token(config: GenerationConfig, eos: frozenset[int]) -> int:
    """Return what fills rows behind their end: as in transformers, the first EOS id where the config has no pad id."""
    for given in (config.pad_token_id, config.eos_token_id):
        if given is not None and (ids := torch.as_tensor(given).flatten().tolist()):
            return ids[0]
    return min(eos, default=0)
