"""Hugging Face's logits processors, converted to processors over a token tree, and those to parameters of rows.

`generate` prepares a list of objects. Each that can be expressed by a tensor per row becomes a row processor
(`processors`), each other known one a function with constants (`tree_processors`), in the order of the list and with
the same results. Unknown processors are called once per node, and those that cannot be exact on a tree are refused by
name.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.sampling import processors, tree_processors
from redrafter.sampling.host_processors import PerNode
from redrafter.sampling.prefixes import Prefixes

Reader = Callable[[Any, tree_processors.CallPrompts], processors.OwnProcessor | processors.Processor]

# Scores divided by a smaller temperature may exceed float32. At this one already, the likeliest token is drawn.
SMALLEST_TEMPERATURE = 1e-30


def read_processors(
    listed: Iterable[LogitsProcessor], *, width: int, prompt: Tensor, vocabulary: int, min_new_tokens: int | None = None
) -> tuple[list[processors.OwnProcessor], list[str]]:
    """Turn Hugging Face's logits processors, as `generate` prepared them, into processors over a tree.

    They were made for a padded prompt of `width` tokens, while rows have `prompt` `[B]` int64 tokens without padding,
    on the target's device, and for scores of `vocabulary` ids. `min_new_tokens` is the call's, 0 too; None for none.

    Returns:
        The processors in the same order, and the names of those that run node by node in Python.

    Raises:
        UnsupportedError: Naming a processor that cannot be exact on a tree.
    """
    call = tree_processors.CallPrompts(width, prompt, vocabulary)
    # With min_new_tokens, generate also sets min_length to the padded width + min_new_tokens: too much for a short row.
    implied = None if min_new_tokens is None else width + min_new_tokens
    built, slow = list[processors.OwnProcessor](), list[str]()
    for processor in list[Any](listed):
        _refuse(processor)
        name = _known(processor)
        if name == "MinLengthLogitsProcessor" and processor.min_length == implied:
            continue
        read = READERS[name](processor, call) if name in READERS else PerNode([processor] * len(prompt))
        if isinstance(read, PerNode):
            slow.append(getattr(processor, "__name__", type(processor).__name__))
        if not isinstance(read, processors.RowProcessor | processors.HostProcessor):
            read = processors.Constant((name, _constants(vars(processor), width)), read)
        built.append(read)
    return built, slow


def fold_rows(
    listed: Sequence[processors.OwnProcessor], rows: int, ends: Collection[int], *, sampled: bool
) -> list[dict[str, Any]]:
    """Return processors of a call as parameters of each of its rows, by their names in `SamplingParams`.

    A processor becomes parameters of the rows if every step knows it and it is listed in the order in which steps apply
    processors; any other stays the caller's own. So rows draw as the list defines, whatever it contains. `ends` are ids
    that end a sequence. If tokens are not `sampled`, processors for sampling only are the caller's own too.
    """
    own = len(processors.FIRST_EDITS)
    order = (*processors.FIRST_EDITS, None, processors.RowTemperature, *processors.CUTS)  # None: the caller's own
    place = 0  # the lowest index in this order that may come next
    columns: dict[str, list[Any]] = {"extra": [()] * rows, "extra_last": [()] * rows}
    for processor in listed:
        named = _named(processor, ends)
        stage = order.index(type(processor)) if named and (sampled or type(processor) in processors.FIRST_EDITS) else -1
        early = 0 < place <= own and not columns["extra"][0]
        if stage == 0 and early and {*named["logit_bias"][0].values()} <= {-math.inf}:
            # Forbidden tokens stay forbidden whatever comes before or after, so they can join an earlier bias.
            columns["logit_bias"] = [columns.get("logit_bias", [{}])[0] | named["logit_bias"][0]] * rows
        elif stage >= place:
            columns |= named
            place = stage + 1
        else:
            name, place = ("extra", own) if place <= own else ("extra_last", len(order))
            columns[name] = [(*each, processor.at([row])) for row, each in enumerate(columns[name])]
    return [{name: values[row] for name, values in columns.items()} for row in range(rows)]


def _named(processor: processors.OwnProcessor, ends: Collection[int]) -> dict[str, list[Any]]:
    """Return the parameters that express a processor, for each row; none if no parameters do."""
    if isinstance(processor, processors.RowBias):  # the same in all rows
        tokens = processor.bias[0].nonzero()[:, 0]
        bias = dict(zip(tokens.tolist(), processor.bias[0, tokens].tolist(), strict=True))
        return {"logit_bias": [bias] * len(processor.bias)}
    # The parameter applies to the row's own stop tokens, so it must name exactly these.
    if isinstance(processor, processors.RowMinimum):
        vocabulary = processor.ends.shape[1]
        if processor.ends[0].nonzero()[:, 0].tolist() != sorted(end for end in ends if end < vocabulary):
            return {}
        return {"min_new_tokens": processor.tokens.clamp(min=0).tolist()}
    if not isinstance(processor, processors.RowProcessor) or len(processor.settings) != len(processor.reads):
        return {}
    return {name: value.tolist() for name, value in zip(processor.reads, processor.settings, strict=True)}


# Attributes that count tokens from the start of the padded prompt.
_POSITIONS = {"begin_index", "max_length", "regulation_start"}


def _constants(value: object, width: int) -> Hashable:
    """Return constants of an object as something that equals that of another object which does the same.

    `width` is the length of the padded prompt that the object was made for, which may differ between calls.
    """
    if isinstance(value, Mapping):
        # Positions count the padding, which differs between calls that are otherwise the same.
        pairs = ((key, each - width if key in _POSITIONS else each) for key, each in value.items())
        return tuple((key, _constants(each, width)) for key, each in pairs)
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(_constants(each, width) for each in value) if isinstance(value, list | tuple) else value


def _prefix_constrained(processor: Any, call: tree_processors.CallPrompts) -> PerNode:
    # The user's function gets the row's index, which the object can only derive in the full batch.
    allowed = vars(processor)["_prefix_allowed_tokens_fn"]

    def of_row(row: int) -> LogitsProcessor:
        return type(processor)(lambda _, text: allowed(row, text), 1)

    return PerNode([of_row(row) for row in range(len(call.prompt))])


def _temperature(processor: Any, call: tree_processors.CallPrompts) -> processors.RowProcessor:
    return processors.RowTemperature(call.per_row(max(processor.temperature, SMALLEST_TEMPERATURE)))


def _cut(build: Callable[[Any, tree_processors.CallPrompts], processors.RowProcessor]) -> Reader:
    """Return a reader that gives numbers of rows, but for an object that fills with another number or keeps more."""

    def read_row_settings(
        processor: Any, call: tree_processors.CallPrompts
    ) -> processors.OwnProcessor | processors.Processor:
        usual = processor.filter_value == -math.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
        if usual and getattr(processor, "top_p", None) != 1:  # top_p = 1 still removes tokens of probability 0
            return build(processor, call)
        return tree_processors.apply_to_scores(processor, call)

    return read_row_settings


def _top_k(processor: Any, call: tree_processors.CallPrompts) -> processors.RowProcessor:
    k = call.per_row(min(processor.top_k, call.vocabulary), torch.long)
    return processors.RowTopK(k, processors.bound_on_k([processor.top_k], call.vocabulary))


def _repetition_penalty(processor: Any, call: tree_processors.CallPrompts) -> processors.RowProcessor:
    # A tensor `prompt_ignore_length` is each row's padding, which rows have none of here; an int is the user's own
    # wish, counted from the start of the padded row.
    penalty, ignored = call.per_row(processor.penalty), processor.prompt_ignore_length
    return processors.RowRepetition(penalty, call.prompt + (ignored - call.width) if isinstance(ignored, int) else None)


def _min_new_tokens(processor: Any, call: tree_processors.CallPrompts) -> processors.RowProcessor:
    tokens = processor.min_new_tokens + processor.prompt_length_to_skip - call.width
    return processors.RowMinimum(call.per_row(tokens, torch.long), _ends(processor, call))


def _ends(processor: Any, call: tree_processors.CallPrompts) -> Tensor:
    """Return which ids are end tokens, `[B, V]` bool."""
    mask = torch.isin(torch.arange(call.vocabulary), torch.as_tensor(processor.eos_token_id).cpu())
    return mask.to(call.prompt.device).expand(len(call.prompt), -1)


def _check_ids(name: str, ids: Iterable[int], call: tree_processors.CallPrompts) -> None:
    if (largest := max(ids, default=0)) >= call.vocabulary:
        message = f"{name} names token {largest}, but the vocabulary has {call.vocabulary}: use this model's tokenizer"
        raise ArgumentError(message)


def _force(name: str, when: Callable[[Prefixes], Tensor]) -> Reader:
    """Return a reader of an object that forces the ids of its attribute `name` at nodes."""

    def read_ids(processor: Any, call: tree_processors.CallPrompts) -> processors.Processor:
        ids = torch.as_tensor(getattr(processor, name)).flatten().tolist()
        _check_ids(f"forced_{name}", ids, call)
        return tree_processors.force(ids, when)

    return read_ids


def _bias(processor: Any, call: tree_processors.CallPrompts) -> processors.OwnProcessor | processors.Processor:
    """Read biases of single tokens as a tensor per row, whose values captured steps take, and others as constants."""
    biases = processor.sequence_bias
    _check_ids("bad_words_ids or sequence_bias", [token for tokens in biases for token in tokens], call)
    if () in biases:
        raise ArgumentError("bad_words_ids or sequence_bias has a list without tokens")
    if any(len(tokens) > 1 for tokens in biases):
        return tree_processors.bias_sequences(processor, call)
    bias = torch.zeros(call.vocabulary)
    for [token], value in biases.items():
        bias[token] = value
    return processors.RowBias(bias.to(call.prompt.device).expand(len(call.prompt), -1))


def _suppress_at_begin(processor: Any, call: tree_processors.CallPrompts) -> processors.Processor:
    begin = processor.begin_index - call.width
    return tree_processors.forbid(
        processor.begin_suppress_tokens, lambda prefixes: prefixes.counts - prefixes.prompt[:, None] == begin
    )


_HUGGING_FACE = "transformers.generation.logits_process"

_ALIKE = ("EpsilonLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "TypicalLogitsWarper")
# By name, since not every supported release of transformers has every class.
READERS: dict[str, Reader] = {
    **dict.fromkeys(_ALIKE, tree_processors.apply_to_scores),
    **dict.fromkeys(("NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor"), _bias),
    "EtaLogitsWarper": tree_processors.cut_by_eta,
    "ExponentialDecayLengthPenalty": tree_processors.decay_length,
    "ForcedBOSTokenLogitsProcessor": _force("bos_token_id", lambda p: p.counts == 1),
    "ForcedEOSTokenLogitsProcessor": _force("eos_token_id", lambda p: p.counts == p.limit[:, None] - 1),
    "MinLengthLogitsProcessor": lambda processor, call: processors.RowMinimum(
        processor.min_length - call.prompt, _ends(processor, call)
    ),
    "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
    "MinPLogitsWarper": _cut(lambda processor, call: processors.RowMinP(call.per_row(processor.min_p))),
    "NoRepeatNGramLogitsProcessor": tree_processors.ban_repeated_ngrams,
    "PrefixConstrainedLogitsProcessor": _prefix_constrained,
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "SuppressTokensAtBeginLogitsProcessor": _suppress_at_begin,
    "SuppressTokensLogitsProcessor": lambda processor, _: tree_processors.forbid(
        processor.suppress_tokens, lambda p: p.counts > 0
    ),
    "TemperatureLogitsWarper": _temperature,
    "TopHLogitsWarper": tree_processors.cut_by_entropy,
    "TopKLogitsWarper": _cut(_top_k),
    "TopPLogitsWarper": _cut(lambda processor, call: processors.RowTopP(call.per_row(processor.top_p, torch.float64))),
}

# The argument to remove from the call, or from the model's generation_config.
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
    """Refuse a processor that cannot be exact on a tree. A subclass inherits the reason."""
    for base in type(processor).__mro__:
        if base.__module__ == _HUGGING_FACE and base.__name__ in REFUSED:
            raise UnsupportedError(
                f"{type(processor).__name__} cannot be applied to a tree of candidates. "
                f"Remove {REFUSED[base.__name__]} from the call or from the model's generation_config."
            )
