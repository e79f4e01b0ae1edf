"""Logits processors whose settings are the rows' own, so that rows of different requests go through one step.

Each gives at a row what the processor of that name in transformers gives for its setting, and what leaves it off there
leaves it off here; `RowPenalties` is OpenAI's. As in `processors`, nothing waits for the device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.sampling.prefixes import Prefixes

__all__ = ["RowBias", "RowMinP", "RowMinimum", "RowPenalties", "RowRepetition", "RowTemperature", "RowTopK", "RowTopP"]


@dataclass(frozen=True)
class RowTemperature:
    """Divide by each row's own temperature, `[B]`."""

    temperature: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores / self.temperature[:, None, None]


@dataclass(frozen=True)
class RowBias:
    """Add to every token's score what a row asks for it, `[B, V]`."""

    bias: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        return scores + self.bias[:, None]


@dataclass(frozen=True)
class RowRepetition:
    """Penalise tokens that the prompt or the text holds; penalty: `[B]`, 1 for none."""

    penalty: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        penalty = self.penalty[:, None, None]
        seen = prefixes.occurrences(scores.shape[-1], prefixes.prompt.new_zeros(len(self.penalty))) > 0
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


@dataclass(frozen=True)
class RowPenalties:
    """Take from a token's score `presence` once it was written, and `frequency` for each time; `[B]` each, 0 for
    none. The prompt does not count. https://platform.openai.com/docs/api-reference/chat/create"""

    frequency: Tensor
    presence: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        count = prefixes.occurrences(scores.shape[-1], prefixes.prompt)  # [B, M, V]
        taken = self.frequency[:, None, None] * count + self.presence[:, None, None] * (count > 0)
        return scores - taken


@dataclass(frozen=True)
class RowMinimum:
    """No end token before so many tokens are written. tokens: `[B]`; ends: `[B, V]` bool, each row's end tokens."""

    tokens: Tensor
    ends: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        early = prefixes.counts - prefixes.prompt[:, None] < self.tokens[:, None]  # [B, M]
        return scores.masked_fill(early[..., None] & self.ends[:, None], -math.inf)


@dataclass(frozen=True)
class RowTopK:
    """Keep the k likeliest; k: `[B]` int64, 0 for all."""

    k: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        vocabulary = scores.shape[-1]
        place = torch.where(self.k > 0, self.k, vocabulary).clamp(max=vocabulary) - 1
        least = scores.sort(dim=-1, descending=True).values.gather(2, _each(place, scores)[..., None])  # [B, M, 1]
        return scores.masked_fill(scores < least, -math.inf)


@dataclass(frozen=True)
class RowTopP:
    """Keep the likeliest tokens that together hold probability p; p: `[B]`, 1 for all."""

    p: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        ascending, index = scores.sort(dim=-1)
        left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - self.p)[:, None, None]
        left_out[..., -1] = False
        left_out &= (self.p < 1)[:, None, None]
        return scores.masked_fill(left_out.scatter(-1, index, left_out), -math.inf)


@dataclass(frozen=True)
class RowMinP:
    """Keep tokens at least p times as likely as the likeliest; p: `[B]`, 0 for all."""

    p: Tensor

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        probs = scores.softmax(dim=-1)
        top = probs.max(dim=-1, keepdim=True)
        left_out = (probs < self.p[:, None, None] * top.values).scatter(-1, top.indices, False)
        return scores.masked_fill(left_out, -math.inf)


def _each(setting: Tensor, scores: Tensor) -> Tensor:
    """`[B]` to `[B, M]`."""
    return setting[:, None].expand(scores.shape[:2])
