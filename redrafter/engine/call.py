"""A call of `generate` while it is decoded: its rows, their scheduler, and the receivers of their tokens."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers.generation.stopping_criteria import StoppingCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from redrafter.engine.request import CallRequest
from redrafter.engine.streamers import StepStreamer
from redrafter.errors import ArgumentError, NotFiniteError, warn
from redrafter.scheduler.captured_step import collection_paused
from redrafter.scheduler.scheduler import Scheduler
from redrafter.scheduler.sequence import SequenceDelta, Stats, TokenSequence

# Rounds of a call after which its short-lived garbage is collected. Full collections wait for the end of the call: each
# stops decoding for 0.2 s or more in a process that has loaded a model and a compiler, and since a step's objects are
# many and released soon, every third or fourth call of 512 rows had one.
COLLECT_EVERY = 256


@dataclass
class GenerateStats(Stats):
    """Statistics of a batch: totals, which count a step once per row, and the statistics of each row.

    Attributes:
        rows: Statistics of each output row.
        seeds: The seed of each output row; None when greedy.
        first_token_at: When the first token of any row was there, by `time.perf_counter`.
    """

    rows: list[Stats] = field(default_factory=list)
    seeds: list[int] | None = None
    first_token_at: float | None = field(default=None, compare=False)

    @classmethod
    def from_rows(cls, rows: list[Stats], seeds: list[int] | None, at: float | None = None) -> "GenerateStats":
        """Sum the statistics of rows, of which the first token of any was there at this time."""
        return cls(**vars(Stats.total(rows)), rows=rows, seeds=seeds, first_token_at=at)


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output of a decoder-only model in transformers, plus `stats`."""

    stats: GenerateStats | None = None


class OutputRow:
    """One output row of a call: its sequence, and the records of each token."""

    def __init__(self, index: int, prompt: list[int], call: "GenerateCall"):
        """Make a row that has not begun; `prompt` has its padding."""
        self._index, self._prompt, self._call = index, prompt, call
        self.scores: list[Tensor] = []  # processed scores of its tokens, `[count, V]` float32 per step, if recorded
        self.logits: list[Tensor] = []  # logits of its tokens, likewise
        find_stop = self._find_stop if call.request.criteria else None
        row = call.request.rows[index]
        quiet = not (find_stop or call.request.keeps or call.stream or row.params.asks_host)
        self.sequence = TokenSequence(row, self._record, find_stop, quiet)

    @property
    def text(self) -> list[int]:
        """Its new tokens so far."""
        return self.sequence.tokens[len(self.sequence.request.prompt) :]

    def _find_stop(self, new: Sequence[int]) -> int | None:
        """Return the index of the first of `new` tokens that ends the text, or None."""
        end: int | None = None
        for criterion in self._call.request.criteria:
            # Each criterion sees only the tokens up to the earliest stop so far, as it would in undrafted decoding.
            stop = first_stop(criterion, self._prompt + self.text, new, self._call.request.pad_token)
            if stop is not None:
                end, new = stop, new[: stop + 1]
        return end

    def _record(self, sequence: TokenSequence, delta: SequenceDelta) -> None:
        if self._call.first_token_at is None and delta.tokens:
            self._call.first_token_at = time.perf_counter()
        if delta.finish is not None:  # few deltas end a row, and each line here runs for every row of every step
            if isinstance(delta.error, ArgumentError | NotFiniteError):  # raised by its grammar, or for its logits
                delta = replace(delta, error=type(delta.error)(f"row {self._index}: {delta.error}"))
            self._call.ended += 1
            self._call.error = self._call.error or delta.error
            if delta.error is not None:
                return
        if self._call.request.keeps:
            for recorded, new in ((self.scores, delta.scores), (self.logits, delta.logits)):
                if new is not None:
                    recorded.append(new.to(torch.float32, copy=True))  # a view would keep those of rejected drafts
        if self._call.stream is not None:
            self._call.stream.put_step(self._index, delta.tokens, delta.accepted, delta.finish is not None)


def first_stop(criterion: StoppingCriteria, text: Sequence[int], new: Sequence[int], pad: int) -> int | None:
    """Return the index of the first of `new` tokens after which `criterion` stops; None where it does not.

    Each token is tested with exactly the text up to it; `text` are the tokens before the step, including padding.
    Hugging Face's stop strings look at a fixed number of last tokens, so all of `new` are tested at once; a user's own
    criterion is called once per token with ids `[1, L]` and no scores. `pad` fills a text from the left.
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


class GenerateCall:
    """The rows of a request, which one scheduler decodes.

    Attributes:
        rows: The rows, in their order.
        ended: Number of rows that have ended, counted so that no step has to look at all of the rows.
        error: The error that ended the first failed row; None where there is no such row.
        first_token_at: When the first token of any row was there, by `time.perf_counter`; None before.
    """

    def __init__(self, request: CallRequest, stream: StepStreamer | None = None):
        """Make rows before their first tokens; `stream`, if given, receives tokens as they are made."""
        self.request, self.stream = request, stream
        self.ended, self.error, self.first_token_at = 0, None, None  # type: int, BaseException | None, float | None
        self.rows = [OutputRow(index, prompt, self) for index, prompt in enumerate(request.input_ids.tolist())]

    @contextmanager
    def queued(self, scheduler: Scheduler) -> Iterator[None]:
        """Queue the rows in a scheduler without sequences, and release their slots and blocks at the end.

        Within the context an exception in a round is raised by that round.
        """

        # A server reports errors to one sequence; a call raises them.
        def fail(error: Exception, _: int) -> None:
            raise error

        scheduler.on_failure = fail
        try:
            scheduler.submit(*(row.sequence for row in self.rows))
            yield
        finally:
            # Also after an error or an interrupt: the batch and its blocks serve the next call.
            scheduler.abandon()

    def decode(self, scheduler: Scheduler, progress: bool = False) -> Tensor | GenerateOutput:
        """Decode the rows in a scheduler without sequences until all have ended, or the request's deadline has passed.

        Returns:
            Ids `[B, P + new]`, the padded prompts first, or a `GenerateOutput` where the request asks for one.
        """
        self._warn_slow()
        deadline, ranks = self.request.deadline, scheduler.engine.target.ranks
        shown = tqdm(total=len(self.rows), unit="text") if progress else nullcontext()
        with self.queued(scheduler), collection_paused(), shown as bar:
            rounds = 0
            while not scheduler.idle:
                scheduler.prefill()
                # Rank 0's clock decides for all: ranks that stop after different rounds would wait for each other for
                # ever.
                if deadline < float("inf") and ranks.from_first(time.time() >= deadline):
                    scheduler.settle()
                    break
                scheduler.step()
                rounds += 1
                if rounds % COLLECT_EVERY == 0:
                    gc.collect(1)
                if bar is not None:
                    bar.update(self.ended - bar.n)
                if self.error is not None:
                    raise self.error
        return self.output()

    def output(self) -> Tensor | GenerateOutput:
        """End the stream, and return what `decode` returns, of rows that have ended."""
        if self.stream is not None:
            self.stream.end()
        self._warn_cut_short()

        rows, request = self.rows, self.request
        texts = [row.text for row in rows]
        width = max(map(len, texts))
        new = torch.tensor([text + [request.pad_token] * (width - len(text)) for text in texts], dtype=torch.long)
        sequences = torch.cat([request.input_ids, new], dim=1).to(request.device)
        if not request.as_dict:
            return sequences
        seeds = None if request.rows[0].params.greedy else [row.params.seed for row in request.rows]
        # transformers annotates these fields more narrowly than the values it assigns itself.
        return GenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=_columns([row.scores for row in rows]) if "scores" in request.keeps else None,  # type: ignore[arg-type]
            logits=_columns([row.logits for row in rows]) if "logits" in request.keeps else None,  # type: ignore[arg-type]
            stats=GenerateStats.from_rows([row.sequence.stats for row in rows], seeds, self.first_token_at),
        )

    def _warn_slow(self) -> None:
        criteria = [type(c).__name__ for c in self.request.criteria if type(c) is not StopStringCriteria]
        for names, what in ((self.request.slow_processors, "node of the tree"), (criteria, "token")):
            if names:
                warn(
                    f"{', '.join(names)}: your own code runs in Python once per {what}, which is slow; "
                    "built-in generation arguments are vectorised"
                )

    def _warn_cut_short(self) -> None:
        cut_short = [
            row.sequence
            for row, cut in zip(self.rows, self.request.cut_short, strict=False)
            if cut and len(row.text) == row.sequence.request.max_new_tokens
            if row.text[-1] not in row.sequence.request.params.stop_token_ids
        ]
        if cut_short:
            which = "the text" if len(self.rows) == 1 else f"{len(cut_short)} of {len(self.rows)} texts"
            warn(
                f"{which} ended at the target's context of {cut_short[0].max_length} tokens "
                "(max_position_embeddings of its config), before the requested length; model.generate may continue "
                "beyond what the model was made for: request fewer new tokens, or shorten the prompt"
            )


def _columns(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Regroup scores or logits `[count, V]` of each row's steps by position, as transformers' `generate` returns them.

    One tensor `[B, V]` for each new token of the longest row; rows that ended before it have zeros there.
    """
    first = next((piece for pieces in rows for piece in pieces), None)
    if first is None:
        return ()
    none = first[:0]  # for a row without any token, because of the deadline
    return pad_sequence([torch.cat([none, *pieces]) for pieces in rows], batch_first=True).unbind(dim=1)
