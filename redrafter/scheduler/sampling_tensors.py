"""Sampling parameters of rows as tensors, which captured steps read in place."""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.cache.to_device import to_device
from redrafter.parallel.ranks import ALONE, Ranks
from redrafter.sampling import processors
from redrafter.sampling.host_processors import RowGrammars
from redrafter.sampling.params import NEUTRAL, SamplingParams
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.captured_step import bucket
from redrafter.scheduler.sequence import TokenSequence

FEW = 8  # a captured step that sorts few rows' scores has room for one row in eight
_TABLES = ("logit_bias", "stop_token_ids", "thinking")  # which have a table row for each batch row
_KINDS: tuple[type[processors.RowProcessor], ...] = (*processors.EDITS, processors.RowTemperature, *processors.CUTS)
_READ = [name for kind in _KINDS for name in kind.reads if name not in _TABLES]
# Each row's numbers, by the dtype of their columns. transformers accumulates probabilities of top-p in float64.
FLAGS, DOUBLES = ["greedy"], ["top_p"]
NO_DRAFT_LIMIT = 1 << 31  # more levels than any tree has
INTEGERS = [
    "seed",
    "prompt",
    "limit",
    "draft_limit",
    *(name for name in _READ if isinstance(getattr(NEUTRAL, name), int)),
]
FLOATS = [name for name in _READ if name not in (*INTEGERS, *DOUBLES)]
WARPING = {
    name for kind in _KINDS if kind not in processors.EDITS for name in kind.reads
}  # in which greedy rows are neutral


class Kind(NamedTuple):
    """Key of a captured step.

    A call's steps have exactly the processors that change scores of its rows. A server's steps have those that any of
    its rows needs, in two groups: edits of single tokens are computed in one pass over all rows, cuts of unlikely
    tokens take a sort, of few rows or of all. Without a grammar there are eight such kinds, and no row waits for a sort
    that no row needs.

    Attributes:
        edits: Processors that change scores of single tokens.
        cuts: Processors that cut off unlikely tokens.
        largest_k: Bound on every `top_k` of a call; None where a row has none.
        sorted_rows: Rows of a server whose scores may be sorted: none, one in `FEW`, or all.
        greedy: Whether every row takes the likeliest token.
        limited: Whether a row may limit its drafts, or verify none.
        guided: Whether a row follows a grammar.
        keeps_scores: Whether processed scores are recorded.
        extra: Kinds of the caller's own processors before the temperature.
        extra_last: The same, after all others.
    """

    edits: Sequence[type[processors.RowProcessor]]
    cuts: Sequence[type[processors.RowProcessor]]
    largest_k: int | None
    sorted_rows: int
    greedy: bool
    limited: bool
    guided: bool
    keeps_scores: bool = False
    extra: Hashable = ()
    extra_last: Hashable = ()


class SamplingTensors:
    """Sampling parameters of R rows, one tensor for each parameter, of any combination of sequences.

    Parameters of one dtype are contiguous in memory, so that rows are written and moved in few launches.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        device: torch.device,
        ids: Tensor | None = None,
        *,
        of_call: bool = False,
        ranks: Ranks = ALONE,
    ):
        """Make tensors of parameters, undefined until they are written.

        Args:
            rows: R.
            vocabulary: V.
            device: Where the tensors are.
            ids: `arange(V)` on the device, if there is one already.
            of_call: Whether the rows always belong to one call of `generate`. Steps then run exactly the processors
                that the call needs, and the caller's own; else there are few kinds of steps, which can be captured
                beforehand.
            ranks: The processes that compute the rows together.
        """
        self._rows, self._of_call = rows, of_call
        with device:
            # One tensor for each dtype: writing a row is a copy for each of them, and not one for each parameter.
            self._integers = torch.zeros(len(INTEGERS), rows, dtype=torch.long)
            self._flags = torch.zeros(len(FLAGS), rows, dtype=torch.bool)
            self._floats = torch.ones(len(FLOATS), rows)
            self._doubles = torch.ones(len(DOUBLES), rows, dtype=torch.double)
            self._thinking = torch.zeros(rows, processors.THINKING_COLUMNS, dtype=torch.long)
            self.ids = torch.arange(vocabulary) if ids is None else ids
        self._tables = self._integers, self._flags, self._floats, self._doubles
        self._columns = dict(zip((*INTEGERS, *FLAGS, *FLOATS, *DOUBLES), itertools.chain(*self._tables), strict=True))
        self._grammars = RowGrammars([], ranks)
        self._budgets_written = False  # whether a row was ever given a budget of thoughts
        self._own: dict[Hashable, list[processors.OwnProcessor]] = {}
        self._cut_rows: list[int] = []
        self._cut_index = torch.zeros(rows, dtype=torch.long, device=device)  # the same, where steps look for it
        self._bias_and_stops: tuple[Tensor, Tensor] | None = None  # as large as the logits: made when first needed

    @property
    def bias_and_stops(self) -> tuple[Tensor, Tensor]:
        """Logit bias `[R, V]` float32, and whether a token ends the sequence, `[R, V]` bool."""
        if self._bias_and_stops is None:
            bias = torch.zeros(self._rows, len(self.ids), device=self.ids.device)
            self._bias_and_stops = bias, torch.zeros_like(bias, dtype=torch.bool)
        return self._bias_and_stops

    def write(self, first: int, sequences: Sequence[TokenSequence]) -> None:
        """Write the parameters of sequences into the rows from `first` on."""
        rows, device = slice(first, first + len(sequences)), self.ids.device
        integers, doubles = zip(*map(_numbers, sequences), strict=True)
        whole = to_device(integers, device, torch.long).T  # [I + F, R']
        real = to_device(doubles, device, torch.double).T
        self._integers[:, rows] = whole[: len(INTEGERS)]
        self._flags[:, rows] = whole[len(INTEGERS) :].bool()
        self._floats[:, rows] = real[: len(FLOATS)].float()
        self._doubles[:, rows] = real[len(FLOATS) :]
        every = [sequence.request.params for sequence in sequences]
        if any(each.thinking for each in every) or self._budgets_written:
            none = [0] * processors.THINKING_COLUMNS
            lines = [none if x.thinking is None else x.thinking.line(guided=x.grammar is not None) for x in every]
            self._thinking[rows] = to_device(lines, device, torch.long)
            self._budgets_written = True
        for row, sequence in enumerate(sequences, start=first):
            params = sequence.request.params
            if self._bias_and_stops is not None or params.logit_bias or params.min_new_tokens:
                self._write_bias_and_stops(row, params)
            for mine, theirs in zip(self._own_of(params), (*params.extra, *params.extra_last), strict=True):
                for buffer, value in zip(mine.settings, theirs.settings, strict=True):
                    buffer[row] = value[0]

    def _write_bias_and_stops(self, row: int, params: SamplingParams) -> None:
        bias, stops = self.bias_and_stops
        # The row's last sequence may have had others.
        bias[row], stops[row] = 0.0, False
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias.items(), strict=True)
            bias[row, to_device(tokens, bias.device)] = to_device(values, bias.device, bias.dtype)
        # Not `[row, ...] = True`, which waits for the device.
        stops[row].index_fill_(0, to_device(sorted(params.stop_token_ids), stops.device, torch.long), True)

    def _own_of(self, params: SamplingParams) -> list[processors.OwnProcessor]:
        """Return buffers for all rows of processors of the caller's kinds, the same for the same kinds."""
        given = (*params.extra, *params.extra_last)
        assert self._of_call or not given, "a server's rows have named processors only"
        if (kinds := _kinds(given)) not in self._own:
            self._own[kinds] = [each.with_rows(self._rows, self.ids.device) for each in given]
        return self._own[kinds]

    def move(self, source: slice | Tensor, to: slice | Tensor) -> None:
        """Copy the parameters of some rows to as many others; see `move_indices`."""
        for table in self._tables:
            table[:, to] = table[:, source]
        own = (each for buffers in self._own.values() for each in buffers)
        for tensor in (self._thinking, *(self._bias_and_stops or ()), *(x for each in own for x in each.settings)):
            tensor[to] = tensor[source]

    def kind(self, sequences: Sequence[TokenSequence]) -> Kind | None:
        """Return the key of the captured step when these sequences are in the first rows; None without any."""
        if not sequences:
            return None
        params = [sequence.request.params for sequence in sequences]
        greedy = all(each.greedy for each in params)
        guided = any(each.grammar is not None for each in params)
        if not self._of_call:
            rows, cut = bucket(len(params)), sum(each.cuts for each in params)
            # Sizes are rounded to three values, so that few kinds of steps are captured.
            sorted_rows = rows if cut > rows // FEW else rows // FEW * bool(cut)
            edits = processors.EDITS if any(each.edits for each in params) else ()
            return Kind(
                edits, processors.CUTS if sorted_rows else (), None, sorted_rows, greedy, limited=True, guided=guided
            )
        asked = {kind for each in params for kind in each.asked}
        edits, cuts = (tuple(kind for kind in group if kind in asked) for group in (processors.EDITS, processors.CUTS))
        return Kind(
            edits,
            cuts,
            largest_k=processors.bound_on_k([each.top_k for each in params], len(self.ids))
            if processors.RowTopK in asked
            else None,
            sorted_rows=0,
            greedy=greedy,
            limited=any(each.num_speculative_tokens is not None for each in params),
            guided=guided,
            keeps_scores=any("scores" in sequence.request.keeps for sequence in sequences),
            extra=_kinds(params[0].extra),
            extra_last=_kinds(params[0].extra_last),
        )

    def sampler(self, rows: int, sequences: Sequence[TokenSequence], keep_scores: bool = False) -> Sampler:
        """Return a sampler of the first rows that reads these tensors in place.

        The processors have the order of those of transformers.

        Args:
            rows: How many rows.
            sequences: The sequences in the first rows; later rows are inactive.
            keep_scores: Whether a step needs the processed logits too, as rejection sampling does.
        """
        kind = self.kind(sequences)
        # An inactive row still needs valid settings, such as a temperature that is no zero.
        if kind is None:  # all rows are inactive
            columns = {name: self._columns[name][:rows] for name in ("temperature", "prompt", "limit")}
            return Sampler(seeds=None, processors=(), ids=self.ids, **columns)
        self.load_texts(sequences)

        def made(kinds: Iterable[type[processors.RowProcessor]]) -> list[processors.ProcessorOfRows]:
            def setting(name: str) -> Tensor:
                if name == "thinking":
                    return self._thinking
                return self.bias_and_stops[_TABLES.index(name)] if name in _TABLES else self._columns[name]

            return [each(*(setting(name)[:rows] for name in each.reads)) for each in kinds]

        params = sequences[0].request.params
        own = [each.map(lambda setting: setting[:rows]) for each in self._own_of(params)]
        edits, cut = kind.edits, made(kind.cuts)
        if processors.RowTopK in kind.cuts:
            k = self._columns["top_k"][:rows]
            cut[0] = processors.RowTopK(k, kind.largest_k)
            if not self._of_call and self.ids.is_cuda:
                # A captured step sorts once for both. A CPU sorts for top-p alone: it can check how many tokens top-k
                # needs.
                cut[:2] = [processors.RowTopP(self._columns["top_p"][:rows], k)]
        if 0 < kind.sorted_rows < rows:
            cut = [processors.OfSomeRows(self._cut_index[: kind.sorted_rows], tuple(cut))]  # type: ignore[arg-type]
        return Sampler(
            seeds=None if kind.greedy else self._columns["seed"][:rows],
            processors=(
                *made(each for each in edits if each in processors.FIRST_EDITS),
                *own[: len(params.extra)],
                *made(each for each in edits if each not in (*processors.FIRST_EDITS, processors.RowThinkingBudget)),
                *([self._grammars] if kind.guided else []),
                *made(each for each in edits if each is processors.RowThinkingBudget),
                *([] if kind.greedy else made([processors.RowTemperature])),
                *cut,
                *own[len(params.extra) :],
            ),
            temperature=self._columns["temperature"][:rows],
            prompt=self._columns["prompt"][:rows],
            limit=self._columns["limit"][:rows],
            ids=self.ids,
            keep_scores=keep_scores or kind.keeps_scores,
            # A server's step serves any mixture, as rows come and go without a new capture.
            greedy=None if kind.greedy or self._of_call else self._columns["greedy"][:rows],
            draft_limits=self._columns["draft_limit"][:rows] if kind.limited else None,
        )

    def load_texts(self, sequences: Sequence[TokenSequence]) -> None:
        """Give host processors the state of these sequences, and note which of the first rows are cut."""
        if not sequences:
            return
        self._grammars.of_rows[:] = [sequence.guide for sequence in sequences]
        params = [sequence.request.params for sequence in sequences]
        for at, mine in enumerate(self._own_of(params[0])):
            if isinstance(mine, processors.HostProcessor):
                mine.of_rows[:] = [(*each.extra, *each.extra_last)[at].of_rows[0] for each in params]  # type: ignore[union-attr]
        cut = [row for row, each in enumerate(params) if each.cuts]
        if cut and cut != self._cut_rows:  # where few rows are sorted, the first one fills the remaining entries
            self._cut_rows = cut
            self._cut_index.copy_(to_device(cut + cut[:1] * (self._rows - len(cut)), self.ids.device, torch.long))

    def sampler_of(self, sequences: Sequence[TokenSequence]) -> Sampler:
        """Return a sampler for sequences that have no rows yet, in the order of the sequences."""
        device, ranks = self.ids.device, self._grammars.ranks
        tensors = SamplingTensors(len(sequences), len(self.ids), device, self.ids, of_call=self._of_call, ranks=ranks)
        tensors.write(0, sequences)
        return tensors.sampler(len(sequences), sequences)


def _kinds(given: Iterable[processors.OwnProcessor]) -> Hashable:
    return tuple(each.kind for each in given)


def _numbers(sequence: TokenSequence) -> tuple[list[int], list[float]]:
    """Return a row's numbers in the order of the columns: integers with flags, then floats and doubles."""
    params = sequence.request.params
    # Greedy rows get neutral cuts: these cannot change the likeliest token, and equal kinds share steps.
    numbers = {name: getattr(NEUTRAL if params.greedy and name in WARPING else params, name) for name in _READ}
    numbers |= {"seed": params.seed, "prompt": len(sequence.request.prompt), "limit": sequence.max_length}
    limit = NO_DRAFT_LIMIT if params.num_speculative_tokens is None else params.num_speculative_tokens
    numbers |= {"greedy": params.greedy, "draft_limit": limit}
    return [numbers[name] for name in (*INTEGERS, *FLAGS)], [numbers[name] for name in (*FLOATS, *DOUBLES)]
