"""The rows of one request while they are decoded, on either kind of cache."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.cache.block_manager import BlockTable
from redrafter.cache.paged import PagedCache, stack_block_tables
from redrafter.drafting.adaptive_length import AdaptiveDraftLength
from redrafter.drafting.proposer import Proposer, State
from redrafter.engine.cuda_graphs import CapturedStep, CUDAGraphRunner, bucket
from redrafter.engine.request import Request
from redrafter.errors import CacheFullError
from redrafter.sampling.sampler import Sampler
from redrafter.step import StepOutput, prefill, step
from redrafter.target.target import Target

__all__ = ["Batch", "DenseBatch", "PagedBatch", "room"]


class Batch(Protocol):
    """`prefill` once, then `step` after `step`, `close` at last."""

    proposer: Proposer  # of the next step
    depth: int  # the deepest that any proposer of this batch may draft

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        """Read the prompts. Returns what was drawn, and the same on the host: per row its tokens and, last, the
        accepted length."""

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        """One step for all rows that move; the report of others says nothing. longest: committed tokens of the longest
        row."""

    def keep(self, active: Sequence[bool]) -> None:
        """From now on only these rows move."""

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        """Give the memory back. texts: what each row wrote."""


class DenseBatch:
    """On caches of the batch's own, as large as its longest row: any device, any model that can be served at all."""

    def __init__(
        self, target: Target, proposer: Proposer, request: Request, lengths: AdaptiveDraftLength | None = None
    ):
        self.target, self.proposer, self.request, self._lengths = target, proposer, request, lengths
        self.depth = proposer.depth
        self.cache: Any = target.new_cache(len(request.length))
        self.draft_cache: Any = None if proposer.model is None else proposer.model.new_cache(len(request.length))

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        request, longest = self.request, max(self.request.lengths)
        self._reserve(longest)
        width = max(request.limits) + room(self.proposer)
        tokens = pad(request.prompts[:, :longest], (0, width - longest))
        self.state, drawn = prefill(
            tokens,
            request.length,
            self.target,
            self.cache,
            request.sampler,
            new=longest,
            draft_model=self.proposer.model,
            draft_cache=self.draft_cache,
        )
        return drawn, _read(drawn)

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        if len(self.request.length) == self.proposer.scratch_slots == 1:
            self.cache.reserve_one_token(longest)
        else:
            self._reserve(longest + self.proposer.depth + self.proposer.scratch_slots)  # that overshoot
        if self.target.needs_reread(longest):
            self.target.reread(self.state.tokens, self.state.length, self.state.active, self.cache)
        self.state, drawn = step(
            self.state, self.proposer, self.target, self.cache, self.request.sampler, self.draft_cache
        )
        report = _read(drawn)
        if self._lengths is not None:
            self.proposer = self._lengths.next_proposer(drawn.levels, report)
        return drawn, report

    def keep(self, active: Sequence[bool]) -> None:
        self.state = self.state.with_active(torch.tensor(active, device=self.state.active.device))
        if self._lengths is not None:
            self._lengths.set_active(active)

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        self.cache = self.draft_cache = None

    def _reserve(self, slots: int) -> None:
        self.cache.reserve(slots)
        if self.draft_cache is not None:
            self.draft_cache.reserve(slots)


class PagedBatch:
    """Rows on the paged store of their target, decoded by captured steps; their prompts are read uncaptured.

    proposer_for: when so many rows have ended that a smaller batch would do, the others go on in one, with the proposer
    that this gives for so many rows; None to stay. lengths: what says after each step how far to draft in the next.
    """

    def __init__(
        self,
        graphs: CUDAGraphRunner,
        proposer: Proposer,
        request: Request,
        proposer_for: Callable[[int], Proposer] | None = None,
        lengths: AdaptiveDraftLength | None = None,
    ):
        graphs.check_adapters()
        self.graphs, self.proposer, self.request, self._proposer_for = graphs, proposer, request, proposer_for
        self._lengths = lengths
        self._rows = list(range(len(request.lengths)))  # by place in the captured step
        smaller = [1 << power for power in range(bucket(len(self._rows)).bit_length() - 1)] if proposer_for else []
        proposers = [proposer, *(proposer_for(rows) for rows in smaller if proposer_for is not None)]
        self.depth = max(each.depth for each in proposers)
        self._width = max(request.limits) + max(map(room, proposers))
        ids = request.prompts.tolist()
        self._texts = [row[:length] for row, length in zip(ids, request.lengths, strict=True)]
        self.captured: CapturedStep | None = None
        self.leases: list[BlockTable] = []
        extra = max(room(each) + each.scratch_slots for each in proposers)
        with graphs.lock:
            try:
                for text, limit in zip(self._texts, request.limits, strict=True):
                    self.leases.append(graphs.blocks.admit(text, limit + extra, reuse=self._is_steady(limit)))
            except CacheFullError:
                self._release()
                raise

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        request, device = self.request, self.graphs.target.device
        table = stack_block_tables(self.leases, device)
        reused = [lease.reused for lease in self.leases]
        draft_model, draft_store = self.proposer.model, self.graphs.draft_store
        state, drawn = prefill(
            pad(request.prompts, (0, max(self._width - request.prompts.shape[1], 0)))[:, : self._width],
            request.length,
            self.graphs.target,
            PagedCache(self.graphs.store, table),
            request.sampler,
            start=torch.tensor(reused, device=device),
            new=max(length - skip for length, skip in zip(request.lengths, reused, strict=True)),
            draft_model=draft_model,
            draft_cache=None if draft_model is None or draft_store is None else PagedCache(draft_store, table),
        )
        self._publish(self._texts)
        self._load(state, table, request.sampler)
        return drawn, _read(drawn)

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        assert self.captured is not None, "prefill comes first"
        state, target = self.captured.state, self.graphs.target
        if target.needs_reread(longest):
            with torch.inference_mode():
                target.reread(state.tokens, state.length, state.active, self.captured.cache)
        self.captured.replay()
        report: list[list[int]] = [[] for _ in self.leases]
        for row, line in zip(self._rows, self.captured.read(), strict=False):
            report[row] = line
        drawn = self.captured.drawn
        if self._lengths is not None:
            proposer = self._lengths.next_proposer(drawn.levels, report)
            if proposer is not self.proposer:
                self._move(list(range(len(self._rows))), proposer)
        return drawn, report

    def keep(self, active: Sequence[bool]) -> None:
        step = self.captured
        assert step is not None, "prefill comes first"
        if self._lengths is not None:
            self._lengths.set_active(active)
        left = [place for place, row in enumerate(self._rows) if active[row]]
        if self._proposer_for is None or not left or bucket(len(left)) == len(step.state.length):
            moving = torch.tensor([active[row] for row in self._rows])
            step.state.active[: len(moving)] = moving.to(step.state.active.device)
            return
        self._move(left, self.proposer if self._lengths is not None else self._proposer_for(len(left)))

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        if self.captured is not None:  # otherwise a prefill failed, and nothing says that its blocks hold the prompts
            # The last token that a row wrote is pending, or was never looked at; the one before it, a draft model may
            # have proposed and not read.
            unread = 1 if self.graphs.draft_store is None else 2
            self._publish([[*text, *new[:-unread]] for text, new in zip(self._texts, texts, strict=True)])
            self.graphs.give_back()
        self._release()

    def _move(self, places: list[int], proposer: Proposer) -> None:
        """Go on with the rows in these places of the captured step, in another one."""
        step = self.captured
        assert step is not None, "prefill comes first"
        index = torch.tensor(places, device=step.state.length.device)
        state, table, sampler = step.state.at(index), step.cache.table[index], step.sampler.at(index)
        self._rows = [self._rows[place] for place in places]
        self.proposer = proposer
        self.graphs.give_back()
        self.captured = None
        self._load(state, table, sampler)

    def _load(self, state: State, table: Tensor, sampler: Sampler) -> None:
        self.captured = self.graphs.borrow(len(self._rows), self.proposer, self.request.sampler, self._width)
        self.captured.load(state, table, sampler)

    def _publish(self, texts: Sequence[Sequence[int]]) -> None:
        if self.graphs.draft_store is not None and self.proposer.model is None:
            return  # in these blocks a draft model would find nothing
        with self.graphs.lock:
            for lease, text, limit in zip(self.leases, texts, self.request.limits, strict=True):
                if self._is_steady(limit):
                    self.graphs.blocks.publish(lease, text)

    def _is_steady(self, limit: int) -> bool:
        """Tell whether blocks of a row of up to `limit` tokens hold what any row with the same text would have."""
        steady = self.graphs.target.fixed_rope_context
        return steady is None or limit <= steady

    def _release(self) -> None:
        with self.graphs.lock:
            for lease in self.leases:
                self.graphs.blocks.release(lease)


def room(proposer: Proposer) -> int:
    """Positions that a row may touch past its limit: its last step may overshoot by K; standing still, it is then
    drafted for K further."""
    return 2 * proposer.depth + 1


def _read(drawn: StepOutput) -> list[list[int]]:
    """The only read from the device in a step."""
    return drawn.pack_for_host().tolist()
