"""Hugging Face's logits processors, read into processors over a token tree.

`generate` prepares a list of objects. Each that a tensor per row can express becomes a row processor (`processors`),
each other known one a function with constants of its own (`tree_processors`), in the order of the list and with the
same results. What is not known is called once per node, and what cannot be exact on a tree is refused by name.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.sampling.grammar_masks import GrammarProcessor
from redrafter.sampling.processors import (
    Constant,
    HostProcessor,
    Processor,
    ProcessorOfRows,
    RowBias,
    RowMinimum,
    RowMinP,
    RowPenalties,
    RowProcessor,
    RowRepetition,
    RowTemperature,
    RowTopK,
    RowTopP,
)
from redrafter.sampling.tree_processors import (
    PerNode,
    apply_to_scores,
    ban_repeated_ngrams,
    bias_sequences,
    cut_by_entropy,
    cut_by_eta,
    decay_length,
    forbid,
    force,
)

# Scores over a smaller temperature may be past any float32. At this one already, the likeliest token is drawn.
SMALLEST_TEMPERATURE = 1e-30
SMALLEST_TOP_K = 64  # bounds on k are this or a higher power of two, so that captured steps serve many k


@dataclass(frozen=True)
class Call:
    """What the objects of a call were made for.

    Attributes:
        width: Length of the padded prompt.
        prompt: Each row's own prompt length, `[B]` int64, on the target's device.
        vocabulary: Number of ids V that the target gives scores for.
    """

    width: int
    prompt: Tensor
    vocabulary: int

    def per_row(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `value` for each row, `[B]`."""
        return torch.full(self.prompt.shape, value, dtype=dtype, device=self.prompt.device)


def read_processors(
    processors: Iterable[LogitsProcessor], *, width: int, prompt: Tensor, vocabulary: int
) -> tuple[list[ProcessorOfRows], list[str]]:
    """Turn Hugging Face's logits processors into processors over a tree, in the same order.

    Args:
        processors: The objects, as `generate` prepared them.
        width: Length of the padded prompt that the objects were made for.
        prompt: Each row's own prompt length, `[B]` int64, on the target's device.
        vocabulary: Number of ids that the target gives scores for.

    Returns:
        The processors, and the names of those that run node by node in Python.

    Raises:
        UnsupportedError: Naming a processor that cannot be exact on a tree.
    """
    call = Call(width, prompt, vocabulary)
    given: list[Any] = list(processors)
    # With min_new_tokens, generate also sets min_length to the padded width + min_new_tokens: too much for a short row.
    implied = {width + p.min_new_tokens for p in given if _known(p) == "MinNewTokensLengthLogitsProcessor"}
    built, slow = list[ProcessorOfRows](), list[str]()
    for processor in given:
        _refuse(processor)
        name = _known(processor)
        if name == "MinLengthLogitsProcessor" and processor.min_length in implied:
            continue
        reader = _OUR_READERS.get(type(processor)) or READERS.get(name, _user_made)
        read = reader(processor, call)
        if isinstance(read, PerNode):
            slow.append(getattr(processor, "__name__", type(processor).__name__))
        if not isinstance(read, RowProcessor | HostProcessor):
            read = Constant((name, _constants(vars(processor), width)), read)
        built.append(read)
    return built, slow


# Attributes that count tokens from the start of the padded prompt.
_POSITIONS = {"begin_index", "max_length", "regulation_start"}


def _constants(value: Any, width: int) -> Hashable:
    """Return constants of an object as something that equals that of another object which does the same.

    Args:
        value: Attributes by name, or part of one.
        width: Length of the padded prompt that the object was made for, which another call's may differ from.
    """
    if isinstance(value, Mapping):
        pairs = ((key, each - width if key in _POSITIONS else each) for key, each in value.items())
        return tuple((key, _constants(each, width)) for key, each in pairs)
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(_constants(each, width) for each in value) if isinstance(value, list | tuple) else value


def index_of_warpers(processors: Sequence[object]) -> int:
    """Return where in a prepared list transformers puts what it adds for sampling alone, the temperature first."""
    index, later = len(processors), len(_WARPERS)
    while index and (name := _known(processors[index - 1])) in _WARPERS[:later]:
        index, later = index - 1, _WARPERS.index(name)
    return index


class TokenPenalties(LogitsProcessor):
    """OpenAI's `frequency_penalty` and `presence_penalty` as a processor for `model.generate`.

    Attributes:
        frequency: What a token's score loses for each time that the token was written.
        presence: What a token's score loses once the token was written.
        prompt_length: Length of the padded prompt, whose tokens do not count.
    """

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` `[B, V]` less the penalties for the texts `input_ids` `[B, L]`."""
        written = input_ids[:, self.prompt_length :]
        count = torch.zeros_like(scores).scatter_add(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - (self.frequency * count + self.presence * (count > 0))


class TemperaturePerRow(LogitsProcessor):
    """A temperature of its own for each output row, as a processor for `model.generate`.

    Attributes:
        temperature: Divisor of each row's scores: a list or a tensor, `[B]`.
    """

    def __init__(self, temperature: Any) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` `[B, V]` divided by the temperatures."""
        return scores / torch.as_tensor(self.temperature, dtype=scores.dtype, device=scores.device)[:, None]


def _user_made(processor: Any, call: Call) -> PerNode:
    return PerNode([processor] * len(call.prompt))


def _prefix_constrained(processor: Any, call: Call) -> PerNode:
    """Tell the user's function the row's index, which the object can only tell in the full batch."""
    allowed = vars(processor)["_prefix_allowed_tokens_fn"]

    def of_row(row: int) -> LogitsProcessor:
        return type(processor)(lambda _, text: allowed(row, text), 1)

    return PerNode([of_row(row) for row in range(len(call.prompt))])


def _temperature(processor: Any, call: Call) -> Processor:
    return RowTemperature(call.per_row(max(processor.temperature, SMALLEST_TEMPERATURE)))


def _temperature_per_row(processor: Any, call: Call) -> Processor:
    temperature = torch.as_tensor(processor.temperature, dtype=torch.float64).clamp(min=SMALLEST_TEMPERATURE)
    return RowTemperature(temperature.to(call.prompt.device, torch.float32))


def _top_k(processor: Any, call: Call) -> Processor:
    if processor.filter_value != -math.inf:
        return apply_to_scores(processor)
    largest = max(SMALLEST_TOP_K, 1 << (processor.top_k - 1).bit_length())
    k = call.per_row(min(processor.top_k, call.vocabulary), torch.long)
    return RowTopK(k, min(largest, call.vocabulary))


def _top_p(processor: Any, call: Call) -> Processor:
    if processor.filter_value != -math.inf or processor.min_tokens_to_keep != 1 or processor.top_p == 1:
        return apply_to_scores(processor)
    return RowTopP(call.per_row(processor.top_p, torch.float64))


def _min_p(processor: Any, call: Call) -> Processor:
    if processor.filter_value != -math.inf or processor.min_tokens_to_keep != 1:
        return apply_to_scores(processor)
    return RowMinP(call.per_row(processor.min_p))


def _repetition_penalty(processor: Any, call: Call) -> Processor:
    """Read the penalty and which part of the prompt it leaves out.

    A tensor `prompt_ignore_length` is each row's padding, which rows have none of here; an int is the user's own wish,
    counted from the start of the padded row.
    """
    penalty, ignored = call.per_row(processor.penalty), processor.prompt_ignore_length
    return RowRepetition(penalty, call.prompt + (ignored - call.width) if isinstance(ignored, int) else None)


def _token_penalties(processor: Any, call: Call) -> Processor:
    return RowPenalties(call.per_row(processor.frequency), call.per_row(processor.presence))


def _min_new_tokens(processor: Any, call: Call) -> Processor:
    tokens = processor.min_new_tokens + processor.prompt_length_to_skip - call.width
    return RowMinimum(call.per_row(tokens, torch.long), _ends(processor, call))


def _min_length(processor: Any, call: Call) -> Processor:
    return RowMinimum(processor.min_length - call.prompt, _ends(processor, call))


def _ends(processor: Any, call: Call) -> Tensor:
    """Return which ids are end tokens, `[B, V]` bool."""
    mask = torch.isin(torch.arange(call.vocabulary), torch.as_tensor(processor.eos_token_id).cpu())
    return mask.to(call.prompt.device).expand(len(call.prompt), -1)


def _bias(processor: Any, call: Call) -> ProcessorOfRows | Processor:
    """Read biases of single tokens as a tensor per row, whose values captured steps take, and others as constants."""
    biases = processor.sequence_bias
    if (largest := max((max(tokens) for tokens in biases), default=0)) >= call.vocabulary:
        raise ArgumentError(
            f"bad_words_ids or sequence_bias names token {largest}, but the vocabulary has {call.vocabulary} "
            "tokens. Make the ids with this model's own tokenizer."
        )
    if any(len(tokens) > 1 for tokens in biases):
        return bias_sequences(processor)
    bias = torch.zeros(call.vocabulary)
    for [token], value in biases.items():
        bias[token] = value
    return RowBias(bias.to(call.prompt.device).expand(len(call.prompt), -1))


def _grammars(processor: Any, call: Call) -> Processor:
    return processor.begin(len(processor.grammars))


def _forced_bos(processor: Any, call: Call) -> Processor:
    return force(processor.bos_token_id, lambda prefixes: prefixes.counts == 1)


def _forced_eos(processor: Any, call: Call) -> Processor:
    return force(processor.eos_token_id, lambda prefixes: prefixes.counts == prefixes.limit[:, None] - 1)


def _suppress(processor: Any, call: Call) -> Processor:
    return forbid(processor.suppress_tokens, lambda prefixes: prefixes.counts > 0)


def _suppress_at_begin(processor: Any, call: Call) -> Processor:
    begin = processor.begin_index - call.width
    return forbid(processor.begin_suppress_tokens, lambda prefixes: prefixes.counts - prefixes.prompt[:, None] == begin)


def _without_call(build: Callable[[Any], Processor]) -> Callable[[Any, Call], ProcessorOfRows | Processor]:
    return lambda processor, call: build(processor)


_OUR_READERS: dict[type, Callable[[Any, Call], ProcessorOfRows | Processor]] = {
    TokenPenalties: _token_penalties,
    TemperaturePerRow: _temperature_per_row,
    GrammarProcessor: _grammars,
}

_HUGGING_FACE = "transformers.generation.logits_process"

# What transformers adds for sampling alone, in its order.
_WARPERS = (
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
)

# By name, since not every supported release of transformers has every class.
READERS: dict[str, Callable[[Any, Call], ProcessorOfRows | Processor]] = {
    "EpsilonLogitsWarper": _without_call(apply_to_scores),
    "EtaLogitsWarper": _without_call(cut_by_eta),
    "ExponentialDecayLengthPenalty": lambda processor, call: decay_length(processor, call.width),
    "ForcedBOSTokenLogitsProcessor": _forced_bos,
    "ForcedEOSTokenLogitsProcessor": _forced_eos,
    "InfNanRemoveLogitsProcessor": _without_call(apply_to_scores),
    "LogitNormalization": _without_call(apply_to_scores),
    "MinLengthLogitsProcessor": _min_length,
    "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
    "MinPLogitsWarper": _min_p,
    "NoBadWordsLogitsProcessor": _bias,
    "NoRepeatNGramLogitsProcessor": _without_call(ban_repeated_ngrams),
    "PrefixConstrainedLogitsProcessor": _prefix_constrained,
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "SequenceBiasLogitsProcessor": _bias,
    "SuppressTokensAtBeginLogitsProcessor": _suppress_at_begin,
    "SuppressTokensLogitsProcessor": _suppress,
    "TemperatureLogitsWarper": _temperature,
    "TopHLogitsWarper": _without_call(cut_by_entropy),
    "TopKLogitsWarper": _top_k,
    "TopPLogitsWarper": _top_p,
    "TypicalLogitsWarper": _without_call(apply_to_scores),
}

# What to take out of the call, or of the model's generation_config.
REFUSED = {
    "AlternatingCodebooksLogitsProcessor": "logits_processor",
    "BarkEosPrioritizerLogitsProcessor": "min_eos_p",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "DiaClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "DiaEOSChannelFilterLogitsProcessor": "logits_processor",
    "DiaEOSDelayPatternLogitsProcessor": "logits_processor",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "HammingDiversityLogitsProcessor": "diversity_penalty",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
    "WhisperNoSpeechDetection": "no_speech_threshold",
    "WhisperTimeStampLogitsProcessor": "return_timestamps",
}


def _known(processor: object) -> str:
    """Return the exact class's name if it is Hugging Face's own, else ""; a subclass may do anything."""
    return type(processor).__name__ if type(processor).__module__ == _HUGGING_FACE else ""


def _refuse(processor: object) -> None:
    """Refuse what cannot be exact on a tree. A subclass inherits the reason."""
    for base in type(processor).__mro__:
        if base.__module__ == _HUGGING_FACE and base.__name__ in REFUSED:
            raise UnsupportedError(
                f"{type(processor).__name__} cannot be applied to a tree of candidates. "
                f"Remove {REFUSED[base.__name__]} from the call or from the model's generation_config."
            )
