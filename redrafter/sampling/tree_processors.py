"""Logits processors with constants of their own, as functions over the nodes of a token tree, and a user's own code.

transformers' objects take `input_ids [B, L]` and `scores [B, V]`: one text per row, padded to one length. A tree has a
text per node, and its rows have no padding. Each builder here makes a function of `scores [B, N, V]` and `Prefixes`
that gives at every node what the object gives for that node's text alone. Lengths that the object counts over a padded
prompt of `width` tokens are counted from the row's own prompt.

No such function reads a tensor on the host or has a shape that depends on data, so a step can be captured in a CUDA
graph; constants go to the device in the first call. `PerNode`, which calls code that may do anything, runs on the host.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from redrafter.sampling.prefixes import Prefixes, marks
from redrafter.sampling.processors import HostProcessor, Processor


class PerNode(HostProcessor[Callable[[Tensor, Tensor], Tensor]]):
    """Each row's processor of one text at a time, called once for every node before the row's end.

    It is a function of ids `[1, L]` and scores `[1, V]`.

    A tree may hold texts that the processor itself has forbidden, and a user's grammar need not know how to go on from
    those: an error at a node whose path holds a token of score -inf is not raised, since that node cannot be drawn.
    """

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` `[B, N, V]` processed node by node."""
        tree, sequences, limits = prefixes.tree, prefixes.sequences(), prefixes.limit.tolist()
        whole = tree.tokens.shape[1] == tree.new
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        processed = scores.clone()
        for row, (processor, counts) in enumerate(zip(self.of_rows, prefixes.counts.tolist(), strict=False)):
            for node, count in enumerate(counts):
                if count >= limits[row]:
                    continue
                of_node = scores[row, node, None].clone()  # a user's processor may write into it
                try:
                    processed[row, node] = processor(sequences[row, node, None, :count], of_node)
                except Exception:
                    # While a tree is drafted not all of it is here, and what is wrong with a draft is nobody's error.
                    if whole and not _forbidden(processed[row], tokens[row], parents[row], node):
                        raise
        return processed


def _forbidden(scores: Tensor, tokens: list[int], parents: list[int], node: int) -> bool:
    """Tell whether a token on the way to `node` has score -inf (`[N, V]`) where it would be drawn."""
    while node:
        if scores[parents[node], tokens[node]] == -math.inf:
            return True
        node = parents[node]
    return False


def apply_to_scores(processor: Any) -> Processor:
    """Apply Hugging Face's own object, which must look at scores alone and never wait for the device."""

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return processor(None, rearrange(scores, "b n v -> (b n) v")).view_as(scores)

    return apply


def forbid(ids: Any, when: Callable[[Prefixes], Tensor]) -> Processor:
    """Give -inf to `ids` at the nodes where `when` `[B, N]` is true. Ids past the vocabulary are passed over."""
    mask = _mask(ids)
    return lambda scores, prefixes: scores.masked_fill(when(prefixes)[..., None] & mask(scores), -math.inf)


def force(ids: Any, when: Callable[[Prefixes], Tensor]) -> Processor:
    """Give 0 to `ids` and -inf to all others, at the nodes where `when` `[B, N]` is true."""
    ids = torch.as_tensor(ids).cpu().flatten()

    @cache
    def forced(vocab: int, device: torch.device) -> Tensor:
        return torch.full((vocab,), -math.inf).index_fill_(0, ids, 0.0).to(device)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        return torch.where(when(prefixes)[..., None], forced(scores.shape[-1], scores.device), scores)

    return apply


def _mask(ids: Any) -> Callable[[Tensor], Tensor]:
    """Mark `ids` in a mask `[V]`, made once on the host: `isin` of many ids waits for the device."""
    ids = torch.as_tensor(ids).cpu()

    @cache
    def mask(vocab: int, device: torch.device) -> Tensor:
        return torch.isin(torch.arange(vocab), ids).to(device)

    return lambda scores: mask(scores.shape[-1], scores.device)


def ban_repeated_ngrams(processor: Any) -> Processor:
    """Ban the last token of every n-gram whose beginning is what the text now ends with."""
    size = processor.ngram_size

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        sequences = prefixes.sequences()  # [B, N, S]
        if sequences.shape[-1] < size:
            return scores
        grams = sequences.unfold(2, size, 1)  # [B, N, S - size + 1, size]
        repeats = (grams[..., :-1] == prefixes.last(size - 1)[:, :, None]).all(-1)
        repeats &= grams[..., -1] >= 0  # not past the end
        return scores.masked_fill(marks(grams[..., -1], repeats, scores.shape[-1]), -math.inf)

    return apply


def bias_sequences(processor: Any) -> Processor:
    """Add a bias to the token that would complete a sequence; a bad word is one with bias -inf."""
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {1: []}  # single tokens first, to sum in the same order
    for sequence, bias in processor.sequence_bias.items():
        by_length.setdefault(len(sequence), []).append((sequence, bias))

    @cache
    def groups(device: torch.device) -> list[tuple[Tensor, Tensor]]:
        pairs = [zip(*group, strict=True) for group in by_length.values() if group]
        return [
            (torch.tensor(words, device=device), torch.tensor(bias, dtype=torch.float, device=device))
            for words, bias in pairs
        ]

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        total = torch.zeros_like(scores)
        for words, bias in groups(scores.device):  # [M, k + 1], [M]
            begun = (prefixes.last(words.shape[1] - 1)[:, :, None] == words[:, :-1]).all(-1)  # [B, N, M]
            total.index_add_(2, words[:, -1], torch.where(begun, bias, 0.0))
        return scores + total

    return apply


def decay_length(processor: Any, width: int) -> Processor:
    """Raise the end tokens' scores by `|score| * (factor^k - 1)`, k tokens after the start of the regulation."""
    mask, start = _mask(processor.eos_token_id), processor.regulation_start - width

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        late = (prefixes.counts - prefixes.prompt[:, None] - start)[..., None]  # [B, N, 1]
        growth = (torch.pow(float(processor.regulation_factor), late.double()) - 1).to(scores.dtype)
        raised = (late > 0) & mask(scores) & scores.isfinite()  # [B, N, V]
        return torch.where(raised, scores + scores.abs() * growth, scores)

    return apply


def _entropy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and entropy `[..., 1]` as `torch.distributions` has them, without its check on the host."""
    log_probs = scores - scores.logsumexp(-1, keepdim=True)
    probs = log_probs.softmax(-1)
    return probs, -(log_probs.clamp(min=torch.finfo(scores.dtype).min) * probs).sum(-1, keepdim=True)


def cut_by_eta(processor: Any) -> Processor:
    """Remove tokens whose probability is below a bound that falls with the entropy (eta sampling)."""
    cutoff, filler = processor.epsilon.cpu(), processor.filter_value
    on_device = cache(cutoff.to)

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        epsilon, entropy = on_device(scores.device), _entropy(scores)[1]
        eta = torch.minimum(epsilon, epsilon.sqrt() * torch.exp(-entropy))  # [B, N, 1]
        kept = scores.topk(min(processor.min_tokens_to_keep, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill((scores.softmax(-1) < eta) & (scores < kept), filler)

    return apply


def cut_by_entropy(processor: Any) -> Processor:
    """Keep the likeliest tokens whose entropies sum to a share of the whole (top-H sampling)."""

    def apply(scores: Tensor, prefixes: Prefixes) -> Tensor:
        top, index = scores.topk(min(processor.top_n, scores.shape[-1]))
        probs, entropy = _entropy(top)
        keep = (-probs * probs.log()).cumsum(-1) <= entropy * processor.top_h  # nan at zero probability: not kept
        keep[..., 0] = True
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, keep)
        return scores.masked_fill(~kept, processor.filter_value)

    return apply
