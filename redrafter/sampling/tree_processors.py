"""Logits processors with constants, as functions over the nodes of a token tree.

transformers' objects take `input_ids [B, L]` and `scores [B, V]`: one sequence per row, padded to one length. A tree
has a sequence per node, and its rows have no padding. Each builder here makes a function of `scores [B, N, V]` and
`Prefixes` that computes at every node what the object computes for that node's sequence alone.

No such function reads a tensor on the host or has a shape that depends on data, so a step can be captured in a CUDA
graph; constants are copied to the device in the first call.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from redrafter.sampling.prefixes import Prefixes, marks
from redrafter.sampling.processors import Processor


class CallPrompts(NamedTuple):
    """The prompts of a call's objects; lengths that these count over the padded prompt include its padding."""

    width: int  # length of the padded prompt
    prompt: Tensor  # each row's own prompt length, `[B]` int64, on the target's device
    vocabulary: int  # ids that the target gives scores for, V

    def per_row(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `value` for each row, `[B]`."""
        return torch.full(self.prompt.shape, value, dtype=dtype, device=self.prompt.device)


def apply_to_scores(processor: Any, call: CallPrompts) -> Processor:
    """Apply Hugging Face's own object, which must look at scores alone and never wait for the device."""

    def call_processor(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return processor(None, rearrange(scores, "b n v -> (b n) v")).view_as(scores)

    return call_processor


def forbid(ids: Tensor | Sequence[int] | int, when: Callable[[Prefixes], Tensor]) -> Processor:
    """Give -inf to `ids` at the nodes where `when` `[B, N]` is true. Ids past the vocabulary are passed over."""
    mask = _mask(ids)
    return lambda scores, prefixes: scores.masked_fill(when(prefixes)[..., None] & mask(scores), -math.inf)


def force(ids: Sequence[int], when: Callable[[Prefixes], Tensor]) -> Processor:
    """Give 0 to `ids` and -inf to all others, at the nodes where `when` `[B, N]` is true."""
    forced = _constant(lambda vocab: torch.full((vocab,), -math.inf).index_fill_(0, torch.tensor(ids), 0.0))
    return lambda scores, prefixes: torch.where(when(prefixes)[..., None], forced(scores), scores)


def _mask(ids: Tensor | Sequence[int] | int) -> Callable[[Tensor], Tensor]:
    ids = torch.as_tensor(ids).cpu()
    return _constant(lambda vocab: torch.isin(torch.arange(vocab), ids))


def _constant(make: Callable[[int], Tensor]) -> Callable[[Tensor], Tensor]:
    # Made once on the host, since `isin` of many ids waits for the device.
    made = cache(lambda vocab, device: make(vocab).to(device))
    return lambda scores: made(scores.shape[-1], scores.device)


def ban_repeated_ngrams(processor: Any, call: CallPrompts) -> Processor:
    """Ban the last token of every n-gram whose beginning is what the text now ends with."""
    size = processor.ngram_size

    def forbid_ngrams(scores: Tensor, prefixes: Prefixes) -> Tensor:
        sequences = prefixes.sequences()  # [B, N, S]
        if sequences.shape[-1] < size:
            return scores
        grams = sequences.unfold(2, size, 1)  # [B, N, S - size + 1, size]
        repeats = (grams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)
        repeats &= grams[..., -1] >= 0  # not past the end
        return scores.masked_fill(marks(grams[..., -1], repeats, scores.shape[-1]), -math.inf)

    return forbid_ngrams


def bias_sequences(processor: Any, call: CallPrompts) -> Processor:
    """Add a bias to the token that would complete a sequence; a bad word is one with bias -inf."""
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}  # single tokens first, to sum in the same order
    for sequence, bias in processor.sequence_bias.items():
        by_length.setdefault(len(sequence), []).append((sequence, bias))

    @cache
    def groups(device: torch.device) -> list[tuple[Tensor, Tensor]]:
        pairs = [zip(*group, strict=True) for group in by_length.values() if group]
        return [(torch.tensor(ids, device=device), torch.tensor(bias, device=device).float()) for ids, bias in pairs]

    def add_biases(scores: Tensor, prefixes: Prefixes) -> Tensor:
        total = torch.zeros_like(scores)
        # One comparison for all sequences of a length, without a loop over the nodes.
        for words, bias in groups(scores.device):  # [M, k + 1], [M]
            begun = (prefixes.last(words.shape[1] - 1)[:, :, None] == words[:, :-1]).all(-1)  # [B, N, M]
            total.index_add_(2, words[:, -1], torch.where(begun, bias, 0.0))
        return scores + total

    return add_biases


def decay_length(processor: Any, call: CallPrompts) -> Processor:
    """Raise the end tokens' scores by `|score| * (factor^k - 1)`, k tokens after the start of the regulation."""
    mask, start = _mask(processor.eos_token_id), processor.regulation_start - call.width

    def raise_end(scores: Tensor, prefixes: Prefixes) -> Tensor:
        late = (prefixes.counts - prefixes.prompt[:, None] - start)[..., None]  # [B, N, 1]
        growth = (torch.pow(float(processor.regulation_factor), late.double()) - 1).to(scores.dtype)
        raised = (late > 0) & mask(scores) & scores.isfinite()  # [B, N, V]
        return torch.where(raised, scores + scores.abs() * growth, scores)

    return raise_end


def _entropy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and entropy `[..., 1]` as `torch.distributions` does, without its check on the host."""
    log_probs = scores - scores.logsumexp(-1, keepdim=True)
    probs = log_probs.softmax(-1)
    return probs, -(log_probs.clamp(min=torch.finfo(scores.dtype).min) * probs).sum(-1, keepdim=True)


def cut_by_eta(processor: Any, call: CallPrompts) -> Processor:
    """Remove tokens whose probability is below a bound that falls with the entropy (eta sampling)."""
    cutoff, filler = processor.epsilon.cpu(), processor.filter_value
    # Copied once per device: a copy during capture would wait for the device.
    on_device = cache(cutoff.to)

    def cut_at_eta(scores: Tensor, prefixes: Prefixes) -> Tensor:
        epsilon, entropy = on_device(scores.device), _entropy(scores)[1]
        eta = torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))  # [B, N, 1]
        kept = scores.topk(min(processor.min_tokens_to_keep, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill((scores.softmax(-1) < eta) & (scores < kept), filler)

    return cut_at_eta


def cut_by_entropy(processor: Any, call: CallPrompts) -> Processor:
    """Keep the likeliest tokens whose entropies sum to a share of the whole (top-H sampling)."""

    def keep_likeliest(scores: Tensor, prefixes: Prefixes) -> Tensor:
        top, index = scores.topk(min(processor.top_n, scores.shape[-1]))
        probs, entropy = _entropy(top)
        keep = (-probs * probs.log()).cumsum(-1) <= entropy * processor.top_h  # nan at zero probability: not kept
        keep[..., 0] = True
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, keep)
        return scores.masked_fill(~kept, processor.filter_value)

    return keep_likeliest
