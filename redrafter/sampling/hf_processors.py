"""Hugging Face's logits processors, at every node of a token tree at once.

`generate` prepares objects that take `input_ids [B, L]` and `scores [B, V]`: one text per row, padded to one length. A
tree has a text per node, and its rows have no padding. So each known class becomes a function of `scores [B, N, V]`
and `Prefixes` that gives at every node what the object gives for that node's own text alone. Lengths that the object
counts over a padded prompt (`width`) are counted from the row's own prompt.

Nothing here reads a tensor on the host or has a shape that depends on data, so a step can be captured in a CUDA graph;
constants go to the device in the first call. The exceptions say so, `on_host`: `PerNode`, for processors that we do
not know, and grammars.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import LogitsProcessor

from redrafter.errors import ArgumentError, UnsupportedError
from redrafter.sampling.grammar_masks import GrammarProcessor
from redrafter.sampling.prefixes import Prefixes
from redrafter.sampling.processors import RowPenalties, RowTemperature

__all__ = ["PerNode", "Prefixes", "Processor", "RowTemperature", "TokenPenalties", "tree_processors"]


Processor = Callable[[Tensor, Prefixes], Tensor]
"""`scores [B, N, V]` float32 -> the same shape, never in place: the raw logits may be returned to the user."""


def tree_processors(processors: Iterable[LogitsProcessor], *, width: int) -> tuple[list[Processor], list[str]]:
    """The same processors over a tree, in the same order, and the names of those that run node by node in Python.

    width: length of the padded prompt that the objects were made for.
    """
    given: list[Any] = list(processors)
    # With min_new_tokens, generate also sets min_length to the padded width + min_new_tokens: too much for a short row.
    implied = {width + p.min_new_tokens for p in given if _known(p) == "MinNewTokensLengthLogitsProcessor"}
    built: list[Processor] = []
    for processor in given:
        _refuse(processor)
        name = _known(processor)
        if name == "MinLengthLogitsProcessor" and processor.min_length in implied:
            continue
        builder = _OUR_BUILDERS.get(type(processor)) or _BUILDERS.get(name, _user_made)
        built.append(builder(processor, width))
    return built, [p.name for p in built if isinstance(p, PerNode)]


class TokenPenalties(LogitsProcessor):
    """OpenAI's `frequency_penalty` and `presence_penalty` as a processor for `model.generate`: what a token's score
    loses for each time that it was written, and once. prompt_length: of the padded prompt, which does not count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int):
        self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids[:, self.prompt_length :]
        count = torch.zeros_like(scores).scatter_add(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - (self.frequency * count + self.presence * (count > 0))


class PerNode:
    """A processor that takes one text at a time, called once for every node in front of the row's end.

    A tree may hold texts that the processor itself has forbidden, and a user's grammar need not know how to go on from
    those: an error at a node whose path holds a token of score -inf is not raised, since that node cannot be drawn.
    """

    on_host = True

    def __init__(self, name: str, of_row: Callable[[int], Callable[[Tensor, Tensor], Tensor]]) -> None:
        self.name = name
        self.of_row = of_row

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        tree, sequences, limits = prefixes.tree, prefixes.sequences(), prefixes.limit.tolist()
        whole = tree.tokens.shape[1] == tree.new
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        processed = scores.clone()
        for row, counts in enumerate(prefixes.counts.tolist()):
            processor = self.of_row(row)
            for node, count in enumerate(counts):
                if count >= limits[row]:
                    continue
                own = scores[row, node, None].clone()  # a user's processor may write into it
                try:
                    processed[row, node] = processor(sequences[row, node, None, :count], own)
                except Exception:
                    # While a tree is drafted not all of it is here, and what is wrong with a draft is nobody's error.
                    if whole and not _forbidden(processed[row], tokens[row], parents[row], node):
                        raise
        return processed


def _forbidden(scores: Tensor, tokens: list[int], parents: list[int], node: int) -> bool:
    """Whether a token on the way to `node` has score -inf (`[N, V]`) where it would be drawn."""
    while node:
        if scores[parents[node], tokens[node]] == -math.inf:
            return True
        node = parents[node]
    return False


def _user_made(processor: Any, width: int) -> PerNode:
    return PerNode(getattr(processor, "__name__", type(processor).__name__), lambda row: processor)


def _prefix_constrained(processor: Any, width: int) -> PerNode:
    """The user's function takes the row's index, which the object can only tell in the full batch."""

    def of_row(row: int) -> LogitsProcessor:
        return type(processor)(lambda _, text: processor._prefix_allowed_tokens_fn(row, text), 1)

    return PerNode(type(processor).__name__, of_row)


def _of_scores(processor: Any, width: int) -> Processor:
    """Hugging Face's own object, for those that look at nothing but scores and never wait for the device."""

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return processor(None, rearrange(scores, "b n v -> (b n) v")).view_as(scores)

    return apply


def _forbid(ids: Any, when: Callable[[Prefixes], Tensor]) -> Processor:
    """-inf at `ids` at the nodes where `when` `[B, N]` is true. Ids past the vocabulary say nothing."""
    mask = _mask(ids)
    return lambda scores, prefixes: scores.masked_fill(when(prefixes)[..., None] & mask(scores), -math.inf)


def _force(ids: Any, when: Callable[[Prefixes], Tensor]) -> Processor:
    """0 at `ids` and -inf elsewhere, at the nodes where `when` `[B, N]` is true."""
    ids = torch.as_tensor(ids).cpu().flatten()

    @cache
    def forced(vocab: int, device: torch.device) -> Tensor:
        return torch.full((vocab,), -math.inf).index_fill_(0, ids, 0.0).to(device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return torch.where(when(prefixes)[..., None], forced(scores.shape[-1], scores.device), scores)

    return apply


def _mask(ids: Any) -> Callable[[Tensor], Tensor]:
    """`[V]` for scores `[..., V]`, true at `ids`. Made on the host, once: `isin` of many ids waits for the device."""
    ids = torch.as_tensor(ids).cpu()

    @cache
    def mask(vocab: int, device: torch.device) -> Tensor:
        return torch.isin(torch.arange(vocab), ids).to(device)

    return lambda scores: mask(scores.shape[-1], scores.device)


def _marks(tokens: Tensor, keep: Tensor, vocab: int) -> Tensor:
    """`[..., V]`, true at `tokens` `[..., M]` where `keep`. A spare column takes the others, and ids past the end."""
    index = torch.where(keep, tokens.clamp(max=vocab), vocab)
    return keep.new_zeros(*index.shape[:-1], vocab + 1).scatter(-1, index, True)[..., :vocab]


def _repetition_penalty(processor: Any, width: int) -> Processor:
    """Penalise what the row already holds. A tensor `prompt_ignore_length` is each row's padding, which ours do not
    have; an int is the user's own wish, counted from the start of the padded row."""
    ignored = processor.prompt_ignore_length if isinstance(processor.prompt_ignore_length, int) else 0

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        vocab, tree, length = scores.shape[-1], prefixes.tree, prefixes.length[:, None]
        first = ignored - width + prefixes.prompt[:, None]  # [B, 1], the first position that counts
        position = torch.arange(prefixes.window, device=scores.device)
        committed = _marks(prefixes.tokens[:, : prefixes.window], (position < length) & (position >= first), vocab)
        counted = tree.ancestors & (length + tree.depth >= first)[:, None]  # [B, M, N]
        seen = committed[:, None] | _marks(tree.tokens[:, None].expand_as(counted), counted, vocab)  # [B, M, V]
        penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
        return torch.where(seen, penalised, scores)

    return apply


def _token_penalties(processor: Any, width: int) -> Processor:
    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        rows = len(prefixes.prompt)
        own = RowPenalties(scores.new_full((rows,), processor.frequency), scores.new_full((rows,), processor.presence))
        return own(scores, prefixes)

    return apply


def _grammars(processor: Any, width: int) -> Processor:
    return processor.begin(len(processor.grammars))


def _no_repeat_ngram(processor: Any, width: int) -> Processor:
    """Ban the last token of every n-gram whose beginning is what the text now ends with."""
    size = processor.ngram_size

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        sequences = prefixes.sequences()  # [B, N, S]
        if sequences.shape[-1] < size:
            return scores
        grams = sequences.unfold(2, size, 1)  # [B, N, S - size + 1, size]
        repeats = (grams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)
        repeats &= grams[..., -1] >= 0  # not past the end
        return scores.masked_fill(_marks(grams[..., -1], repeats, scores.shape[-1]), -math.inf)

    return apply


def _sequence_bias(processor: Any, width: int) -> Processor:
    """Add a bias to the token that would complete a sequence; a bad word is one with bias -inf."""
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}  # single tokens first, to sum in the same order
    for sequence, bias in processor.sequence_bias.items():
        by_length.setdefault(len(sequence), []).append((sequence, bias))
    largest = max((token for sequence in processor.sequence_bias for token in sequence), default=0)

    @cache
    def groups(device: torch.device) -> list[tuple[Tensor, Tensor]]:
        pairs = [zip(*group, strict=True) for group in by_length.values() if group]
        return [
            (torch.tensor(words, device=device), torch.tensor(bias, dtype=torch.float, device=device))
            for words, bias in pairs
        ]

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        if largest >= scores.shape[-1]:
            raise ArgumentError(
                f"bad_words_ids or sequence_bias names token {largest}, but the vocabulary has {scores.shape[-1]} "
                "tokens. Make the ids with this model's own tokenizer."
            )
        total = torch.zeros_like(scores)
        for words, bias in groups(scores.device):  # [M, k + 1], [M]
            begun = (prefixes.last(words.shape[1] - 1)[:, :, None] == words[:, :-1]).all(-1)  # [B, N, M]
            total.index_add_(2, words[:, -1], torch.where(begun, bias, 0.0))
        return scores + total

    return apply


def _exponential_decay(processor: Any, width: int) -> Processor:
    """Raise the end tokens' scores by `|score| * (factor^k - 1)`, k tokens after the start of the regulation."""
    mask, start = _mask(processor.eos_token_id), processor.regulation_start - width

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        late = (prefixes.counts - prefixes.prompt[:, None] - start)[..., None]  # [B, N, 1]
        growth = (torch.pow(float(processor.regulation_factor), late.double()) - 1).to(scores.dtype)
        raised = (late > 0) & mask(scores) & scores.isfinite()  # [B, N, V]
        return torch.where(raised, scores + scores.abs() * growth, scores)

    return apply


def _entropy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and entropy `[..., 1]` as `torch.distributions` has them, without its check on the host."""
    log_probs = scores - scores.logsumexp(-1, keepdim=True)
    probs = log_probs.softmax(-1)
    return probs, -(log_probs.clamp(min=torch.finfo(scores.dtype).min) * probs).sum(-1, keepdim=True)


def _eta(processor: Any, width: int) -> Processor:
    cutoff, filler = processor.epsilon.cpu(), processor.filter_value
    on_device = cache(cutoff.to)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        epsilon, entropy = on_device(scores.device), _entropy(scores)[1]
        eta = torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))  # [B, N, 1]
        kept = scores.topk(min(processor.min_tokens_to_keep, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill((scores.softmax(-1) < eta) & (scores < kept), filler)

    return apply


def _top_h(processor: Any, width: int) -> Processor:
    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        top, index = scores.topk(min(processor.top_n, scores.shape[-1]))
        probs, entropy = _entropy(top)
        keep = (-probs * probs.log()).cumsum(-1) <= entropy * processor.top_h  # nan at zero probability: not kept
        keep[..., 0] = True
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, keep)
        return scores.masked_fill(~kept, processor.filter_value)

    return apply


_OUR_BUILDERS: dict[type, Callable[[Any, int], Processor]] = {
    TokenPenalties: _token_penalties,
    GrammarProcessor: _grammars,
}

_HUGGING_FACE = "transformers.generation.logits_process"

# By name, since not every supported release of transformers has every class.
_BUILDERS: dict[str, Callable[[Any, int], Processor]] = {
    "EpsilonLogitsWarper": _of_scores,
    "EtaLogitsWarper": _eta,
    "ExponentialDecayLengthPenalty": _exponential_decay,
    "ForcedBOSTokenLogitsProcessor": lambda p, width: _force(p.bos_token_id, lambda at: at.counts == 1),
    "ForcedEOSTokenLogitsProcessor": lambda p, width: _force(
        p.eos_token_id, lambda at: at.counts == at.limit[:, None] - 1
    ),
    "InfNanRemoveLogitsProcessor": _of_scores,
    "LogitNormalization": _of_scores,
    "MinLengthLogitsProcessor": lambda p, width: _forbid(p.eos_token_id, lambda at: at.counts < p.min_length),
    "MinNewTokensLengthLogitsProcessor": lambda p, width: _forbid(
        p.eos_token_id,
        lambda at: at.counts - at.prompt[:, None] < p.min_new_tokens + p.prompt_length_to_skip - width,
    ),
    "MinPLogitsWarper": _of_scores,
    "NoBadWordsLogitsProcessor": _sequence_bias,
    "NoRepeatNGramLogitsProcessor": _no_repeat_ngram,
    "PrefixConstrainedLogitsProcessor": _prefix_constrained,
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "SequenceBiasLogitsProcessor": _sequence_bias,
    "SuppressTokensAtBeginLogitsProcessor": lambda p, width: _forbid(
        p.begin_suppress_tokens, lambda at: at.counts - at.prompt[:, None] == p.begin_index - width
    ),
    "SuppressTokensLogitsProcessor": lambda p, width: _forbid(p.suppress_tokens, lambda at: at.counts > 0),
    "TemperatureLogitsWarper": _of_scores,
    "TopHLogitsWarper": _top_h,
    "TopKLogitsWarper": _of_scores,
    "TopPLogitsWarper": _of_scores,
    "TypicalLogitsWarper": _of_scores,
}

# What to take out of the call, or of the model's generation_config.
_REFUSED = {
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
    """The exact class's name if it is Hugging Face's own; a subclass may do anything."""
    return type(processor).__name__ if type(processor).__module__ == _HUGGING_FACE else ""


def _refuse(processor: object) -> None:
    """Refuse what cannot be exact on a tree. A subclass inherits the reason."""
    for base in type(processor).__mro__:
        if base.__module__ == _HUGGING_FACE and base.__name__ in _REFUSED:
            raise UnsupportedError(
                f"{type(processor).__name__} cannot be applied to a tree of candidates. "
                f"Remove {_REFUSED[base.__name__]} from the call or from the model's generation_config."
            )
