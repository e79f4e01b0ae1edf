"""A batch that stands still in the middle of its texts, so that one step can be taken over and over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteriaList

from redrafter.drafting.proposer import Proposer
from redrafter.engine.batch import Batch, DenseBatch, PagedBatch
from redrafter.engine.cuda_graphs import capture
from redrafter.engine.request import Request, read_request
from redrafter.errors import first_line
from redrafter.measure.stopwatch import median_ms
from redrafter.measure.workload import Workload
from redrafter.tree.token_tree import Tree

__all__ = ["Checks", "Stage", "long_texts", "staged"]

STEPS = 20  # steps that allocations are counted over


@dataclass(frozen=True)
class Checks:
    """What a captured step does beside its work. no_wait: its launch never waits for the GPU (waited: what did).
    allocations: new pieces of GPU memory in `steps` steps, their reads included."""

    no_wait: bool
    waited: str | None
    allocations: int
    steps: int


class Stage:
    """batch: an open one, past its prefill, of rows that hold `lengths` committed tokens."""

    def __init__(self, batch: Batch, device: torch.device, lengths: Sequence[int]):
        self.batch, self.device, self.longest, self.tokens = batch, device, max(lengths), sum(lengths)
        self.captured = batch.captured if isinstance(batch, PagedBatch) else None
        if self.captured is not None:
            self.state, self.cache, self.sampler = self.captured.state, self.captured.cache, self.captured.sampler
        else:
            assert isinstance(batch, DenseBatch)
            self.state, self.cache, self.sampler = batch.state, batch.cache, batch.request.sampler
        self._length, self._hidden = self.state.length.clone(), self.state.hidden.clone()

    def restore(self) -> None:
        """Back to where it stood before any step. What a step wrote past that point is scratch."""
        if isinstance(self.batch, DenseBatch):
            self.batch.state = self.state
        else:
            self.state.length.copy_(self._length)
            self.state.hidden.copy_(self._hidden)

    def step(self) -> None:
        """One step as a request takes it, up to where its result is read."""
        if self.captured is not None:
            self.captured.replay()
        else:
            self.batch.step(self.longest)

    def step_ms(self) -> float:
        ms = median_ms(self.step, self.device, before=self.restore)
        self.restore()
        return ms

    def part_ms(self, part: Callable[[], Any]) -> float:
        """Of something that moves no state; captured, where the step is."""
        run = part
        if self.captured is not None and self.captured.graph is not None:
            run = capture(part).replay
        return median_ms(run, self.device)

    def propose(self, proposer: Proposer) -> Callable[[], Tree]:
        """The proposer's part of a step; the noise is the same for all that share it, and drawn before."""
        noise = self.sampler.noise(self.state.length + 1, proposer.depth + 1)
        return lambda: proposer.propose(self.state, self.sampler, noise, None)

    def check(self) -> Checks | None:
        """None where steps are not captured."""
        if self.captured is None:
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
        for _ in range(STEPS):
            self.restore()
            self.captured.replay()
            self.captured.read()
        return Checks(waited is None, waited, self._allocations() - before, STEPS)

    def _allocations(self) -> int:
        return torch.cuda.memory_stats(self.device)["allocation.all.allocated"]


@contextmanager
def staged(work: Workload, texts: Sequence[Sequence[int]], proposer: Proposer, *, advance: int) -> Iterator[Stage]:
    """Read the texts and write on until a row has `advance` new tokens. For use in inference mode."""
    work.engine.forget_prefixes()
    batch = work.engine.open_batch(_request(work, texts, proposer), proposer)
    try:
        batch.prefill()
        lengths, written = [len(text) for text in texts], [1] * len(texts)
        while max(written) < advance:
            _, report = batch.step(max(n + new - 1 for n, new in zip(lengths, written, strict=True)))
            written = [new + row[-1] + 1 for new, row in zip(written, report, strict=True)]
        lengths = [n + new - 1 for n, new in zip(lengths, written, strict=True)]
        yield Stage(batch, work.device, lengths)
    finally:
        batch.close([[] for _ in texts])
        work.engine.forget_prefixes()


def _request(work: Workload, texts: Sequence[Sequence[int]], proposer: Proposer) -> Request:
    """As `generate` makes it, but for the check that texts fit the context: longer ones are timed here too."""
    rows, device = len(texts), work.device
    processors = LogitsProcessorList([TemperatureLogitsWarper(work.temperature)] if work.temperature else [])
    config = GenerationConfig(max_length=2, do_sample=work.temperature > 0, pad_token_id=work.pad_token)
    short = torch.tensor([text[:1] for text in texts], device=device)
    request = read_request(
        work.engine.target,
        short,
        None,
        config,
        processors,
        StoppingCriteriaList(),
        {},
        options=work.engine.options,
        seed=work.seed,
        temperature=None,
    )
    lengths = [len(text) for text in texts]
    limits = [n + work.max_new_tokens + proposer.depth + 1 for n in lengths]
    length, limit = (torch.tensor(each, device=device) for each in (lengths, limits))
    prompts = torch.zeros(rows, max(lengths), dtype=torch.long, device=device)
    for row, text in enumerate(texts):
        prompts[row, : len(text)] = torch.tensor(text, device=device)
    sampler = replace(request.sampler, prompt=length, limit=limit)
    return replace(request, prompts=prompts, length=length, lengths=lengths, limits=limits, sampler=sampler)


def long_texts(prompts: Sequence[Sequence[int]], rows: int, length: int) -> list[list[int]]:
    """Texts of `length` tokens: the prompts one after the other, over and over, each row from another token on, so that
    no two rows begin alike and share keys and values."""
    stream = [token for prompt in prompts for token in prompt]
    return [[stream[(row + i) % len(stream)] for i in range(length)] for row in range(rows)]
