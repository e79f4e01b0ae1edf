"""A batch held at one position in the middle of its texts, so that the same step can be timed over and over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.proposer import Proposer
from redrafter.drafting.vocabulary_map import VocabularyMap
from redrafter.engine.call import Outcome, Row, queued
from redrafter.engine.engine import Engine
from redrafter.engine.request import Request
from redrafter.errors import CacheFullError, first_line
from redrafter.measure.run import Workload, median_ms
from redrafter.sampling.processors import RowTemperature
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.cuda_graphs import capture
from redrafter.scheduler.running_batch import RunningBatch
from redrafter.scheduler.scheduler import Scheduler
from redrafter.target.target import Target
from redrafter.tree.token_tree import Tree

__all__ = ["OneProposer", "StandingBatch", "long_texts", "make_request", "open_standing_batch", "opened"]

ALLOCATION_STEPS = 20  # steps that allocations are counted over


@dataclass(frozen=True)
class OneProposer:
    """The models of an engine with one proposer for any number of rows, as a scheduler takes them.

    Attributes:
        target: The model that verifies.
        draft_model: The model that drafts, or None.
        plain: The proposer that drafts nothing.
        proposer: The proposer.
        rejection_sampling: Whether sampled drafts are kept by rejection sampling.
        draft_vocabulary: What the draft model has for each of the target's tokens; None where its ids are the target's.
    """

    target: Target
    draft_model: Target | None
    plain: Proposer
    proposer: Proposer
    rejection_sampling: bool = False
    draft_vocabulary: VocabularyMap | None = None

    @classmethod
    def of(cls, engine: Engine, proposer: Proposer) -> "OneProposer":
        """Return the models of an engine with this proposer alone."""
        vocabulary = None if proposer.model is None else engine.draft_vocabulary
        return cls(engine.target, proposer.model, engine.plain, proposer, engine.rejection_sampling, vocabulary)

    def proposer_for(self, rows: int) -> Proposer:
        """Return the proposer."""
        return self.proposer

    def draft_step_cost(self, rows: int) -> None:
        """Return None: every step drafts."""


class StandingBatch:
    """A running batch past its prefill, whose state is put back after each step.

    Attributes:
        batch: The running batch.
        device: The target's device.
        longest: Committed tokens of the longest row.
        tokens: Committed tokens of all rows.
        captured: The step.
        state: State of the rows before the step.
        cache: Cache of the target's keys and values.
        sampler: Sampler of the rows.
    """

    def __init__(self, batch: RunningBatch, device: torch.device):
        """Hold the rows of `batch` where they are."""
        lengths = [len(sequence.tokens) - 1 for sequence in batch.rows]
        self.batch, self.device, self.longest, self.tokens = batch, device, max(lengths), sum(lengths)
        self._ranks = batch.target.ranks
        self.captured = batch.prepare_step()
        self.state, self.cache, self.sampler = self.captured.state, self.captured.cache, self.captured.sampler
        self._length, self._hidden = self.state.length.clone(), self.state.hidden.clone()

    def restore(self) -> None:
        """Put the state back to where it was before any step. What steps wrote past that point is overwritten later."""
        self.state.length.copy_(self._length)
        self.state.hidden.copy_(self._hidden)

    def step(self) -> None:
        """Launch one step as a request does."""
        self.captured.replay()

    def step_ms(self) -> float:
        """Return the median time of the step in milliseconds."""
        ms = median_ms(self.step, self.device, before=self.restore, ranks=self._ranks)
        self.restore()
        return ms

    def part_ms(self, part: Callable[[], Any]) -> float:
        """Return the median time of `part`, which must change no state, in milliseconds; captured where the step is."""
        run = part
        if self.captured.graph is not None:
            run = capture(part, watched=self._ranks.size > 1).replay
        return median_ms(run, self.device, ranks=self._ranks)

    def propose(self, proposer: Proposer) -> Callable[[], Tree]:
        """Return a function that proposes a tree for the step; its noise is drawn here, outside of what is timed."""
        noise = self.sampler.noise(self.state.length + 1, proposer.depth + 1)
        return lambda: proposer.propose(self.state, self.sampler, noise, self.cache, None)

    def check(self) -> dict[str, Any] | None:
        """Check whether launching the captured step makes the CPU wait for the GPU, and count GPU allocations.

        The step is launched once with torch set to raise an error at a wait, then `ALLOCATION_STEPS` times to count
        allocations of GPU memory.

        Returns:
            Whether there was `no_wait`; the first line of torch's message about what `waited`, or None; and the
            `allocations` in so many `steps`, the reading of their results included. None where there is no GPU.
        """
        if self.device.type != "cuda":
            return None
        self.restore()
        torch.cuda.synchronize(self.device)
        waited = None
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.captured.replay()
        except RuntimeError as error:
            waited = first_line(error)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        before = self._allocations()
        for _ in range(ALLOCATION_STEPS):
            self.restore()
            self.captured.replay().read()
        found = self._allocations() - before
        return {"no_wait": waited is None, "waited": waited, "allocations": found, "steps": ALLOCATION_STEPS}

    def _allocations(self) -> int:
        return torch.cuda.memory_stats(self.device)["allocation.all.allocated"]


@contextmanager
def opened(engine: Engine, request: Request, proposer: Proposer) -> Iterator[tuple[Scheduler, list[Row], Outcome]]:
    """Prefill all rows of a request in a scheduler of their own, whose steps the caller takes with one proposer.

    Args:
        engine: The engine that decodes.
        request: The request.
        proposer: The proposer of all steps.

    Yields:
        The scheduler, the rows and their outcome.

    Raises:
        CacheFullError: There is no memory for all rows at once.
    """
    with engine.scheduler_for(request, models=OneProposer.of(engine, proposer)) as scheduler:
        outcome = Outcome()
        prompts = zip(request.prompts.tolist(), request.lengths, strict=True)
        rows = [Row(index, request, prompt[:n], outcome, None) for index, (prompt, n) in enumerate(prompts)]
        scheduler.overlap = False
        with queued(scheduler, rows):
            scheduler.read()
            if scheduler.waiting:
                raise CacheFullError(f"there is no memory for {len(rows)} rows at once")
            yield scheduler, rows, outcome


@contextmanager
def open_standing_batch(
    work: Workload, texts: Sequence[Sequence[int]], proposer: Proposer, *, advance: int
) -> Iterator[StandingBatch]:
    """Open a batch that stands still, and close it when the context is left. For use in inference mode.

    Args:
        work: The workload, for its engine and its sampling.
        texts: Token ids that the rows begin with.
        proposer: The proposer of the steps.
        advance: New tokens that some row has when the batch stands still; 0 for none beyond the prefill's.
    """
    work.engine.forget_prefixes()
    new = work.max_new_tokens + proposer.depth + 1
    request = make_request(work.engine, texts, new, temperature=work.temperature, seed=work.seed)
    with opened(work.engine, request, proposer) as (scheduler, rows, _):
        while max(len(row.text) for row in rows) < advance:
            scheduler.step()
        yield StandingBatch(scheduler.batch, work.device)
    work.engine.forget_prefixes()


def make_request(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    new: int,
    *,
    temperature: float,
    seed: int,
    eos: frozenset[int] = frozenset(),
) -> Request:
    """Make a request as `generate` does, without its check that texts fit the context: longer ones are timed too.

    Args:
        engine: The engine that is to decode.
        texts: Token ids of each row's prompt.
        new: New tokens of each row.
        temperature: 0 for greedy decoding.
        seed: Seed of the first row's draws.
        eos: Ids that end a text.
    """
    device, rows = engine.target.device, len(texts)
    lengths = [len(text) for text in texts]
    limits = [length + new for length in lengths]
    length, temperatures = torch.tensor(lengths, device=device), torch.full((rows,), temperature or 1.0, device=device)
    seeds = [seed + row for row in range(rows)] if temperature else None
    return Request(
        prompts=pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device),
        length=length,
        lengths=lengths,
        limits=limits,
        cut_short=[False] * rows,
        eos=eos,
        pad_token=0,
        sampler=Sampler(
            seeds=None if seeds is None else torch.tensor(seeds, device=device),
            processors=(RowTemperature(temperatures),) if temperature else (),
            temperature=temperatures,
            prompt=length,
            limit=torch.tensor(limits, device=device),
            ids=torch.arange(engine.target.vocab_size, device=device),
        ),
        seeds=seeds,
        adapters=[None] * rows,
        criteria=[],
        deadline=float("inf"),
        want_scores=False,
        want_logits=False,
        as_dict=True,
        slow_processors=[],
        images=[None] * rows,
    )


def long_texts(prompts: Sequence[Sequence[int]], rows: int, length: int) -> list[list[int]]:
    """Return texts of `length` tokens, cut from the prompts joined and repeated.

    Each row begins at another token of the joined prompts, so that no two rows share a prefix and so keys and values.

    Args:
        prompts: Token ids of the prompts.
        rows: Texts to return.
        length: Tokens of each text.
    """
    stream = [token for prompt in prompts for token in prompt]
    return [[stream[(row + i) % len(stream)] for i in range(length)] for row in range(rows)]
