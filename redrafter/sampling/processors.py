"""Logits processors of rows that come, move and go, so that different requests share a step.

A row processor computes at every node of a row what transformers' processor of that name computes for the row's setting
and the node's sequence. Its settings are tensors with one value per row, or constants of all rows: a captured step
takes the settings of another request by copying them into its own tensors, without waiting for the device. On a CPU,
where steps are not captured, a processor skips the rows whose setting changes nothing. A processor that runs on the
host has one object per row instead, which is exchanged before a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.sampling.prefixes import Prefixes

TILE = 128  # numbers that are summed before the sums of tiles are added
ALIGNED = 16  # numbers, a multiple of a GPU's widest load


# Sums over the vocabulary in an order that does not depend on the number of rows. On a GPU torch divides the threads of
# a block between rows, so the running sum of a row alone and of the same row among others differ in their last bits;
# and where rows begin at unaligned addresses, so do their softmaxes. A token at the edge of top-p would be kept in one
# batch and not in another.


def running_sum(x: Tensor) -> Tensor:
    """Return the cumulative sum of `x` `[..., V]` over its last dimension, by pointwise additions only."""
    count = x.shape[-1]
    tiles = _sum_by_doubling(pad(x, (0, -count % TILE)).unflatten(-1, (-1, TILE)))  # [..., V / TILE, TILE]
    before = pad(_sum_by_doubling(tiles[..., -1])[..., :-1], (1, 0))
    return (tiles + before[..., None]).flatten(-2)[..., :count]


def _sum_by_doubling(x: Tensor) -> Tensor:
    """Return the cumulative sum of `x` `[..., M]` in log2(M) additions of all numbers (Hillis and Steele 1986)."""
    shift = 1
    while shift < x.shape[-1]:
        x = x + pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x


def row_softmax(x: Tensor) -> Tensor:
    """Return the softmax of `x` `[..., V]` over its last dimension, computed from rows with the same alignment."""
    count = x.shape[-1]
    return pad(x, (0, -count % ALIGNED), value=-torch.inf).softmax(dim=-1)[..., :count]


Processor = Callable[[Tensor, Prefixes], Tensor]
"""`scores [B, N, V]` float32 -> the same shape, never in place: the raw logits may be returned to the user."""

Kind = TypeVar("Kind", bound="RowProcessor")
OnHost = TypeVar("OnHost", bound="HostProcessor[Any]")
OfRow = TypeVar("OfRow")


@dataclass(frozen=True)
class RowProcessor:
    """A logits processor whose tensor fields have one value, or one row of values, for each of `B` rows.

    Attributes:
        reads: Names of the parameters in `SamplingParams` for its first fields, in order. A row needs the processor if
            one of them is not neutral.
        neutral: Values of the first fields that change no score.
        on_host: Whether it runs Python code of a row, which no captured step does.
    """

    on_host: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[tuple[float, ...]] = (0,)

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return processed scores `[B, N, V]`; the input is not modified."""
        if scores.device.type != "cpu":  # the shapes of a captured step do not depend on settings
            return self.process(scores, prefixes)
        changes = (setting != value for setting, value in zip(self.settings, self.neutral, strict=False))
        rows = reduce(torch.logical_or, (each.view(len(scores), -1).any(dim=1) for each in changes)).nonzero()[:, 0]
        if len(rows) == len(scores):
            return self.process(scores, prefixes)
        return OfSomeRows(rows, (self,))(scores, prefixes) if len(rows) else scores

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return the processed scores of all rows; `__call__` skips rows with neutral settings."""
        raise NotImplementedError

    @property
    def kind(self) -> tuple[object, ...]:
        """The class and the fields that are not tensors: equal where only the settings of rows differ."""
        return type(self), *(Tensor if isinstance(value, Tensor) else value for value in self._values().values())

    @property
    def settings(self) -> list[Tensor]:
        """The tensors with one value per row, in the order of the fields."""
        return [value for value in self._values().values() if isinstance(value, Tensor)]

    def map(self: Kind, change: Callable[[Tensor], Tensor]) -> Kind:
        """Return the processor with every tensor replaced by what `change` gives for it."""
        values = self._values().items()
        return replace(self, **{name: change(value) for name, value in values if isinstance(value, Tensor)})

    def at(self: Kind, rows: Sequence[int] | Tensor) -> Kind:
        """Return the processor of some of the rows, in that order."""
        return self.map(lambda setting: setting[rows])

    def with_rows(self: Kind, count: int, device: torch.device) -> Kind:
        """Return a processor of the same kind with room for the settings of so many rows, on a device."""
        return self.map(lambda setting: setting.new_zeros(count, *setting.shape[1:], device=device))

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


@dataclass(frozen=True)
class Constant(RowProcessor):
    """A processor with the same effect in every row."""

    constants: tuple[object, ...]  # constants of `function`: equal for functions with the same effect
    function: Processor = field(compare=False)

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `function(scores, prefixes)`, `[B, N, V]`."""
        return self.function(scores, prefixes)


class HostProcessor(Generic[OfRow]):
    """A logits processor that runs on the host, with an object for each row. No step with one is captured."""

    on_host: ClassVar[bool] = True
    settings: ClassVar[Sequence[Tensor]] = ()

    def __init__(self, of_rows: Sequence[OfRow]) -> None:
        self.of_rows = list(of_rows)  # may change between steps; rows past the last one are inactive

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return processed scores `[B, N, V]`; the ones given are not written to."""
        raise NotImplementedError

    @property
    def kind(self) -> object:
        """The class: any objects of rows are of one kind."""
        return type(self)

    def map(self: OnHost, change: Callable[[Tensor], Tensor]) -> OnHost:
        """Return the processor itself, which has no tensors."""
        return self

    def at(self: OnHost, rows: Sequence[int]) -> OnHost:
        """Return the processor of some of the rows, in that order."""
        return type(self)([self.of_rows[row] for row in rows])

    def with_rows(self: OnHost, count: int, device: torch.device) -> OnHost:
        """Return a processor of the same kind without rows; `of_rows` grows to any number."""
        return type(self)([])


@dataclass(frozen=True)
class OfSomeRows:
    """Row processors that are applied to some rows only, so that the others cost nothing."""

    rows: Tensor  # `[S]` int64; a row may occur several times
    processors: tuple[RowProcessor, ...]  # of all rows, in their order
    on_host: ClassVar[bool] = False

    def __call__(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return processed scores `[B, N, V]`; the ones given are not written to."""
        part, prefixes = scores[self.rows], prefixes.of_rows(self.rows)
        for processor in self.processors:
            part = processor.at(self.rows)(part, prefixes)
        return scores.index_copy(0, self.rows, part)


OwnProcessor = RowProcessor | HostProcessor[Any]
ProcessorOfRows = OwnProcessor | OfSomeRows


@dataclass(frozen=True)
class RowTemperature(RowProcessor):
    """Divide by a temperature."""

    temperature: Tensor  # `[B]` float32, positive
    reads, neutral = ("temperature",), (1,)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` divided by the temperatures."""
        return scores / self.temperature[:, None, None]


@dataclass(frozen=True)
class RowBias(RowProcessor):
    """Add a bias to the scores of single tokens."""

    bias: Tensor  # `[B, V]` float32
    reads = ("logit_bias",)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` plus the biases."""
        return scores + self.bias[:, None]


@dataclass(frozen=True)
class RowRepetition(RowProcessor):
    """Penalise tokens that occur before a node, including in the prompt."""

    penalty: Tensor  # divisor of positive scores and factor of negative ones, `[B]` float32; 1 for none
    first: Tensor | None = None  # first position that counts, `[B]` int64; None for all
    reads, neutral = ("repetition_penalty",), (1,)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with the tokens that were seen penalised."""
        penalty = self.penalty[:, None, None]
        first = torch.zeros_like(prefixes.prompt) if self.first is None else self.first
        seen = prefixes.seen(scores.shape[-1], first)  # [B, M, V]
        # On a GPU, torch divides by a number, as transformers does here, by multiplying with its reciprocal.
        quotient = scores * penalty.reciprocal() if scores.is_cuda else scores / penalty
        return torch.where(seen, torch.where(scores < 0, scores * penalty, quotient), scores)


@dataclass(frozen=True)
class RowPenalties(RowProcessor):
    """Subtract OpenAI's frequency and presence penalty from the scores of tokens that were generated.

    https://platform.openai.com/docs/api-reference/chat/create
    """

    frequency: Tensor  # subtracted for each occurrence of a token, `[B]` float32
    presence: Tensor  # subtracted once for a token that occurs, `[B]` float32
    reads, neutral = ("frequency_penalty", "presence_penalty"), (0, 0)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` minus the penalties."""
        count = prefixes.occurrences(scores.shape[-1], prefixes.prompt)  # [B, M, V]
        penalty = self.frequency[:, None, None] * count + self.presence[:, None, None] * (count > 0)
        return scores - penalty


@dataclass(frozen=True)
class RowMinimum(RowProcessor):
    """Forbid end tokens before a minimum number of tokens was generated."""

    tokens: Tensor  # minimum number of tokens, `[B]` int64; 0 or less for none
    ends: Tensor  # whether an id ends a sequence, `[B, V]` bool
    reads = "min_new_tokens", "stop_token_ids"

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with -inf at end tokens of sequences that are too short."""
        early = prefixes.counts - prefixes.prompt[:, None] < self.tokens[:, None]  # [B, M]
        return scores.masked_fill(early[..., None] & self.ends[:, None], -math.inf)


@dataclass(frozen=True)
class RowTopK(RowProcessor):
    """Keep the k likeliest tokens, and those that tie with the last of them."""

    k: Tensor  # `[B]` int64; 0 for all
    # Bound on every `k`, none of which is 0 then, known on the host. None sorts the whole vocabulary, since the host
    # must not wait for the device.
    largest_k: int | None = None
    reads = ("top_k",)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with -inf at all but the k likeliest tokens."""
        vocabulary, largest = scores.shape[-1], self.largest_k
        kept = torch.where(self.k > 0, self.k, vocabulary)  # [B]
        if largest is None and scores.device.type == "cpu":
            # The host reads a CPU tensor without waiting, and selecting k values is cheaper than sorting the
            # vocabulary.
            largest = int(kept.max())
        if largest is None:
            descending = scores.sort(dim=-1, descending=True).values
        else:
            descending = scores.topk(min(largest, vocabulary)).values
        last = kept.clamp(max=descending.shape[-1]) - 1  # [B]
        least = descending.gather(2, last[:, None, None].expand(-1, scores.shape[1], 1))  # [B, M, 1]
        # Ties with the k-th score are kept, as in transformers.
        return scores.masked_fill(scores < least, -math.inf)


@dataclass(frozen=True)
class RowTopP(RowProcessor):
    """Keep the likeliest tokens that together hold probability p, of the k likeliest ones."""

    p: Tensor  # `[B]` float64, so that 1 - p is rounded only once; 1 for all
    k: Tensor | None = None  # as in `RowTopK`, from the same sort, `[B]` int64; None if no row has one
    reads, neutral = ("top_p",), (1, 0)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with -inf at the unlikeliest tokens, whose probabilities add up to 1 - p at most."""
        ascending, index = scores.sort(dim=-1, stable=True)  # so that equal scores are cut alike in any batch
        below: Tensor | None = None
        if self.k is not None:
            vocabulary = scores.shape[-1]
            first = vocabulary - torch.where(self.k > 0, self.k, vocabulary).clamp(max=vocabulary)  # [B]
            least = ascending.gather(2, first[:, None, None].expand(-1, scores.shape[1], 1))  # [B, M, 1]
            below = ascending < least
            ascending = ascending.masked_fill(below, -math.inf)  # the order stays that of a sort
        removed = running_sum(row_softmax(ascending)) <= (1 - self.p).float()[:, None, None]
        # The likeliest token stays, as in transformers, even where it alone exceeds p.
        removed[..., -1] = False
        removed &= (self.p < 1)[:, None, None]
        if below is not None:
            removed |= below
        return scores.masked_fill(removed.scatter(-1, index, removed), -math.inf)


@dataclass(frozen=True)
class RowMinP(RowProcessor):
    """Keep tokens that are at least p times as likely as the likeliest one."""

    p: Tensor  # `[B]` float32; 0 for all tokens
    reads = ("min_p",)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with -inf at tokens that are too unlikely."""
        probs = row_softmax(scores)
        top = probs.max(dim=-1, keepdim=True)
        removed = (probs < self.p[:, None, None] * top.values).scatter(-1, top.indices, False)
        return scores.masked_fill(removed, -math.inf)


MAX_BEGIN_TOKENS = 15  # of the mark that begins a thought


class ThinkingBudget(NamedTuple):
    """Maximum number of tokens of a thought at the start of the output.

    Attributes:
        tokens: Tokens that may be written before the end is forced.
        end: Id of the token that ends a thought.
        begin: Ids that begin it, at most `MAX_BEGIN_TOKENS`; none where the prompt ends within the thought.
    """

    tokens: int
    end: int
    begin: tuple[int, ...] = ()

    def line(self, *, guided: bool = False) -> list[int]:
        """Return the row of the table that `RowThinkingBudget` reads: numbers plus 1, and 0 for unused entries.

        `guided` marks a row with a grammar, which may not allow the end within a character.
        """
        padding = [0] * (MAX_BEGIN_TOKENS - len(self.begin))
        return [self.tokens + 1, self.end + 1, int(guided), *(token + 1 for token in self.begin), *padding]


THINKING_COLUMNS = len(ThinkingBudget(0, 0).line())


@dataclass(frozen=True)
class RowThinkingBudget(RowProcessor):
    """Force the end of a thought at the draw after a number of its tokens, or at the first later one that allows it.

    It follows grammars: where the grammar of a row has forbidden the end, the row's scores are unchanged.
    """

    budgets: Tensor  # a `ThinkingBudget.line` of each row, `[B, THINKING_COLUMNS]` int64; 0 for none
    reads = ("thinking",)

    def process(self, scores: Tensor, prefixes: Prefixes) -> Tensor:
        """Return `scores` with 0 at the end token and -inf at all others where a thought has reached its budget."""
        tree, length = prefixes.tree, prefixes.length[:, None]
        end, guided, begin = self.budgets[:, 1:2] - 1, self.budgets[:, 2:3] > 0, self.budgets[:, 3:]
        first = prefixes.prompt[:, None]  # [B, 1]
        start = first + (begin > 0).sum(dim=1, keepdim=True)  # [B, 1], position of the first token within the thought
        index = torch.arange(begin.shape[1], device=begin.device)
        written = prefixes.at((first + index)[:, None].expand(-1, tree.new, -1))  # [B, M, L]
        begun = ((written == begin[:, None] - 1) | (begin == 0)[:, None]).all(dim=-1)  # [B, M]
        position = torch.arange(prefixes.window, device=begin.device)
        over = (prefixes.tokens[:, : prefixes.window] == end) & (position >= start) & (position < length)  # [B, S]
        ends = (tree.tokens == end) & (length + tree.depth >= start)  # [B, N]
        ended = over.any(dim=1, keepdim=True) | (tree.ancestors & ends[:, None]).any(dim=-1)  # [B, M]
        late = prefixes.counts - (start + self.budgets[:, :1] - 1)  # [B, M]
        token = end.clamp(min=0)[:, None]  # [B, 1, 1]
        allowed = scores.gather(-1, token.expand(-1, tree.new, 1))[..., 0] > -math.inf  # [B, M]
        due = (self.budgets[:, :1] > 0) & torch.where(guided, (late >= 0) & allowed, late == 0)
        forced = torch.full_like(scores[:, :1], -math.inf).scatter(-1, token, 0.0)  # [B, 1, V]
        return torch.where((due & begun & ~ended)[..., None], forced, scores)


# The processors of `SamplingParams` by name, in transformers' order: those that change the scores of single tokens,
# with a caller's own after the first of them; the budget of thoughts after grammars; and, after temperature, those that
# cut off unlikely tokens.
FIRST_EDITS: tuple[type[RowProcessor], ...] = (RowBias, RowRepetition, RowMinimum)
EDITS: tuple[type[RowProcessor], ...] = (*FIRST_EDITS, RowPenalties, RowThinkingBudget)
CUTS: tuple[type[RowProcessor], ...] = (RowTopK, RowTopP, RowMinP)

SMALLEST_TOP_K = 64  # bounds on k are this or a higher power of two, so that captured steps serve many values of k


def bound_on_k(ks: Sequence[int], vocabulary: int) -> int | None:
    """Return a bound on every k for `RowTopK`; None where one is 0."""
    return min(max(SMALLEST_TOP_K, 1 << (max(ks) - 1).bit_length()), vocabulary) if min(ks) else None
