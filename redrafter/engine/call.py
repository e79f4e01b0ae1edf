"""A call of `generate` while it is decoded: its rows, and the scheduler that runs them."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from redrafter.engine.request import Request
from redrafter.engine.streaming import StepStreamer
from redrafter.errors import ArgumentError, NotFiniteError
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SequenceDelta, Stats, TokenSequence


@dataclass
class GenerateStats(Stats):
    """Statistics of a batch: totals, in which a row's step counts once for that row, and those of each row.

    Attributes:
        rows: Statistics of each output row.
        seeds: The seed of each output row; None when greedy.
    """

    rows: list[Stats] = field(default_factory=list)
    seeds: list[int] | None = None

    @classmethod
    def of(cls, rows: list[Stats], seeds: list[int] | None) -> "GenerateStats":
        """Sum the statistics of rows, whose drafts need not be of one length."""
        depths = zip_longest(*(row.accepted_by_depth for row in rows), fillvalue=0)
        return cls(
            steps=sum(row.steps for row in rows),
            drafted=sum(row.drafted for row in rows),
            accepted=sum(row.accepted for row in rows),
            emitted=sum(row.emitted for row in rows),
            accepted_by_depth=[sum(depth) for depth in depths],
            plain_steps=sum(row.plain_steps for row in rows),
            rows=rows,
            seeds=seeds,
        )


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output of a decoder-only model in transformers, plus `stats`."""

    stats: GenerateStats | None = None


@dataclass
class Outcome:
    """Counts the ends of a call's rows and keeps the first error, so that no step has to look at all of the rows.

    Attributes:
        ended: Number of rows that have ended.
        error: What ended a row that did not end by itself; None where there is no such row.
    """

    ended: int = 0
    error: BaseException | None = None

    def note(self, delta: SequenceDelta) -> None:
        """Take note of what a step added to a row."""
        self.ended += delta.finish is not None
        self.error = self.error or delta.error


class Row:
    """One output row of a call: its sequence, and what is recorded of each token.

    Attributes:
        sequence: The sequence, which knows the prompt without padding.
        text: New tokens so far.
        scores: Processed scores of its tokens, `[count, V]` float32 per step; empty where nobody asked.
        logits: Logits of its tokens, likewise.
    """

    def __init__(self, index: int, request: Request, prompt: list[int], outcome: Outcome, stream: StepStreamer | None):
        """Make a row that has not begun, of a call whose prompt at `index` is `prompt`, padding included.

        `outcome` takes note of its end, and `stream`, if there is one, takes its tokens as they are made.
        """
        self._prompt, self._criteria, self._pad_token = prompt, request.criteria, request.pad_token
        self._index, self._outcome, self._stream = index, outcome, stream
        self.text: list[int] = []
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        wanted = {"scores": request.want_scores, "logits": request.want_logits}
        self.sequence = TokenSequence(
            request.prompts[index, : request.lengths[index]].tolist(),
            request.limits[index] - request.lengths[index],
            request.params[index],
            self._record,
            self._find_stop if self._criteria else None,
            adapter=request.adapters[index],
            index=index,
            keeps=frozenset(name for name, want in wanted.items() if want),
            images=request.images[index],
        )

    def _find_stop(self, new: Sequence[int]) -> int | None:
        """Return the index of the first of `new` tokens that the text ends with, or None."""
        end: int | None = None
        for criterion in self._criteria:
            stop = first_stop(criterion, self._prompt + self.text, new, self._pad_token)
            if stop is not None:
                end, new = stop, new[: stop + 1]
        return end

    def _record(self, sequence: TokenSequence, delta: SequenceDelta) -> None:
        if isinstance(delta.error, ArgumentError | NotFiniteError):  # of its grammar, or of its logits
            delta = replace(delta, error=type(delta.error)(f"row {self._index}: {delta.error}"))
        self._outcome.note(delta)
        if delta.error is not None:
            return
        self.text += delta.tokens
        for recorded, new in ((self.scores, delta.scores), (self.logits, delta.logits)):
            if new is not None:
                recorded.append(new.to(torch.float32, copy=True))  # a view would keep those of rejected drafts
        if self._stream is not None:
            self._stream.put_step(self._index, delta.tokens, delta.accepted, delta.finish is not None)


def first_stop(criterion: StoppingCriteria, text: Sequence[int], new: Sequence[int], pad: int) -> int | None:
    """Return the index of the first of `new` tokens after which `criterion` stops; None where it does not.

    Each token is asked about with exactly the text up to it. Hugging Face's stop strings look at a fixed number of last
    tokens, so all of `new` are asked at once; a user's own criterion is called once per token with ids `[1, L]` and no
    scores.

    Args:
        criterion: Hugging Face's, or a user's own.
        text: Tokens of the row before them, padding included.
        new: Tokens of the step.
        pad: Id that fills a text in front.
    """
    whole = [*text, *new]
    ends = range(len(text) + 1, len(whole) + 1)
    if type(criterion) is StopStringCriteria:
        reach = criterion.maximum_token_len
        tails = [[pad] * (reach - end) + whole[max(0, end - reach) : end] for end in ends]
        hits = criterion(torch.tensor(tails), None).tolist()
    else:
        hits = (bool(torch.as_tensor(criterion(torch.tensor([whole[:end]]), None)).all()) for end in ends)
    return next((index for index, hit in enumerate(hits) if hit), None)


@contextmanager
def queued(scheduler: Scheduler, rows: Sequence[Row]) -> Iterator[None]:
    """Queue the rows of a call in a scheduler without sequences, and take back what they still hold at the end.

    Within the context an exception in a round is raised by that round.
    """
    scheduler.on_failure = _raise
    try:
        scheduler.enqueue(*(row.sequence for row in rows))
        yield
    finally:
        scheduler.abandon()


def _raise(error: Exception, _: int) -> None:
    raise error


def run_call(
    scheduler: Scheduler, rows: Sequence[Row], outcome: Outcome, deadline: float = float("inf"), progress: bool = False
) -> None:
    """Decode the rows of a call, in a scheduler without sequences, until all have ended.

    After `deadline`, by `time.time()`, no step begins, and rows are as long as they are.
    """
    with queued(scheduler, rows), tqdm(total=len(rows), unit="text", disable=not progress) as bar:
        while not scheduler.idle:
            scheduler.read()
            if deadline < float("inf") and scheduler.engine.target.ranks.from_first(time.time() >= deadline):
                scheduler.settle()
                return
            scheduler.step()
            if progress:
                bar.update(outcome.ended - bar.n)
            if outcome.error is not None:
                raise outcome.error


def decode(
    scheduler: Scheduler, request: Request, input_ids: Tensor, stream: StepStreamer | None, progress: bool = False
) -> Tensor | GenerateOutput:
    """Decode a call in a scheduler without sequences; new tokens follow its padded prompts `input_ids` `[B, P]`.

    Returns:
        Ids `[B, P + new]`, or a `GenerateOutput` where the request asks for one.
    """
    _warn_slow(request)
    outcome = Outcome()
    rows = [Row(index, request, prompt, outcome, stream) for index, prompt in enumerate(input_ids.tolist())]
    run_call(scheduler, rows, outcome, request.deadline, progress)
    if stream is not None:
        stream.end()
    _warn_cut_short(rows, request)
    return _output(rows, input_ids, request)


def _output(rows: list[Row], input_ids: Tensor, request: Request) -> Tensor | GenerateOutput:
    width = max(len(row.text) for row in rows)
    new = torch.tensor([row.text + [request.pad_token] * (width - len(row.text)) for row in rows], dtype=torch.long)
    sequences = torch.cat([input_ids, new.to(input_ids.device)], dim=1)
    if not request.as_dict:
        return sequences
    # transformers annotates these fields more narrowly than what it puts there itself.
    return GenerateOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=_columns([row.scores for row in rows]) if request.want_scores else None,  # type: ignore[arg-type]
        logits=_columns([row.logits for row in rows]) if request.want_logits else None,  # type: ignore[arg-type]
        stats=GenerateStats.of([row.sequence.stats for row in rows], request.seeds),
    )


def _columns(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Regroup scores or logits `[count, V]` of each row's steps by position, as transformers' `generate` returns them.

    One tensor `[B, V]` for each new token of the longest row; rows that ended before it have zeros there.
    """
    first = next((piece for pieces in rows for piece in pieces), None)
    if first is None:
        return ()
    none = first[:0]  # of a row that its deadline has left without any token
    return pad_sequence([torch.cat([none, *pieces]) for pieces in rows], batch_first=True).unbind(dim=1)


def _warn_slow(request: Request) -> None:
    criteria = [type(c).__name__ for c in request.criteria if type(c) is not StopStringCriteria]
    for names, what in ((request.slow_processors, "node of the tree"), (criteria, "token")):
        if names:
            warnings.warn(
                f"{', '.join(names)}: your own code runs in Python once per {what}, which is slow; "
                "built-in generation arguments are vectorised",
                stacklevel=2,
            )


def _warn_cut_short(rows: list[Row], request: Request) -> None:
    """Warn of texts that ended because the target's context did."""
    cut_short = [
        index
        for index, row in enumerate(rows)
        if request.cut_short[index] and len(row.text) == row.sequence.max_new_tokens and row.text[-1] not in request.eos
    ]
    if cut_short:
        which = "the text" if len(rows) == 1 else f"{len(cut_short)} of {len(rows)} texts"
        warnings.warn(
            f"{which} ended at the target's context of {request.limits[cut_short[0]]} tokens "
            "(max_position_embeddings of its config), before the length that was asked for; model.generate may go on, "
            "beyond what the model was made for: ask for fewer new tokens, or shorten the prompt",
            stacklevel=2,
        )
