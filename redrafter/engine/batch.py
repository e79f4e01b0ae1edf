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

__all__ = ["Batch", "DenseBatch", "PagedBatch", "overshoot"]


class Batch(Protocol):
    """Rows that are decoded together: `prefill` once, `step` until all have ended, `close` at last.

    Attributes:
        proposer: What drafts in the next step.
        depth: The deepest that any proposer of this batch may draft.
    """

    proposer: Proposer
    depth: int

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        """Read the prompts and draw the first token of each row.

        Returns:
            What was drawn, and the same on the host: for each row its tokens and, last, the accepted length.
        """

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        """Take one step with all rows that move.

        Args:
            longest: Committed tokens of the longest row.

        Returns:
            What was drawn, and the same on the host as `prefill` returns it; undefined for rows that stand still.
        """

    def keep(self, active: Sequence[bool]) -> None:
        """Let only the rows where `active` is true move from now on."""

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        """Give the memory back; `texts` holds the tokens that each row wrote."""


class DenseBatch:
    """A batch on caches of its own, as large as its longest row, for any device and any supported model."""

    def __init__(
        self, target: Target, proposer: Proposer, request: Request, lengths: AdaptiveDraftLength | None = None
    ):
        self.target, self.proposer, self.request, self._lengths = target, proposer, request, lengths
        self.depth = proposer.depth
        self.cache: Any = target.new_cache(len(request.length))
        self.draft_cache: Any = None if proposer.model is None else proposer.model.new_cache(len(request.length))

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        """Read the prompts and draw the first token of each row; see `Batch`."""
        request, longest = self.request, max(self.request.lengths)
        self._reserve(longest)
        width = max(request.limits) + overshoot(self.proposer)
        tokens = pad(request.prompts[:, :longest], (0, width - longest))
        self.state, output = prefill(
            tokens,
            request.length,
            self.target,
            self.cache,
            request.sampler,
            new=longest,
            draft_model=self.proposer.model,
            draft_cache=self.draft_cache,
        )
        return output, _read(output)

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        """Take one step with all rows that move; see `Batch`."""
        if len(self.request.length) == self.proposer.scratch_slots == 1:
            self.cache.reserve_one_token(longest)
        else:
            self._reserve(longest + self.proposer.depth + self.proposer.scratch_slots)  # that overshoot
        if self.target.needs_reread(longest):
            self.target.reread(self.state.tokens, self.state.length, self.state.active, self.cache)
        self.state, output = step(
            self.state, self.proposer, self.target, self.cache, self.request.sampler, self.draft_cache
        )
        report = _read(output)
        if self._lengths is not None:
            self.proposer = self._lengths.next_proposer(output.levels, report)
        return output, report

    def keep(self, active: Sequence[bool]) -> None:
        """Let only the rows where `active` is true move from now on."""
        self.state = self.state.with_active(torch.tensor(active, device=self.state.active.device))
        if self._lengths is not None:
            self._lengths.set_active(active)

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        """Give the memory back; `texts` holds the tokens that each row wrote."""
        self.cache = self.draft_cache = None

    def _reserve(self, slots: int) -> None:
        self.cache.reserve(slots)
        if self.draft_cache is not None:
            self.draft_cache.reserve(slots)


class PagedBatch:
    """A batch in the paged memory of its target, decoded by captured steps; prompts are read uncaptured.

    Args:
        graphs: The captured steps and their memory.
        proposer: What drafts first.
        request: What is to be written.
        proposer_for: Gives the proposer of a smaller batch, in which the rows that are left go on when so many have
            ended that it would do; None to stay.
        lengths: Sets the draft length of each step from the steps before it; None for one length throughout.
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
        self._rows = list(range(len(request.lengths)))  # by index in the captured step
        smaller = [1 << power for power in range(bucket(len(self._rows)).bit_length() - 1)] if proposer_for else []
        proposers = [proposer, *(proposer_for(rows) for rows in smaller if proposer_for is not None)]
        self.depth = max(candidate.depth for candidate in proposers)
        self._width = max(request.limits) + max(map(overshoot, proposers))
        ids = request.prompts.tolist()
        self._texts = [row[:length] for row, length in zip(ids, request.lengths, strict=True)]
        self.captured: CapturedStep | None = None
        self.block_tables: list[BlockTable] = []
        extra = max(overshoot(candidate) + candidate.scratch_slots for candidate in proposers)
        with graphs.lock:
            try:
                for text, limit in zip(self._texts, request.limits, strict=True):
                    self.block_tables.append(graphs.blocks.admit(text, limit + extra, reuse=self._is_steady(limit)))
            except CacheFullError:
                self._release()
                raise

    def prefill(self) -> tuple[StepOutput, list[list[int]]]:
        """Read the prompts and draw the first token of each row; see `Batch`."""
        request, device = self.request, self.graphs.target.device
        table = stack_block_tables(self.block_tables, device)
        reused = [block_table.reused for block_table in self.block_tables]
        draft_model, draft_store = self.proposer.model, self.graphs.draft_store
        state, output = prefill(
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
        return output, _read(output)

    def step(self, longest: int) -> tuple[StepOutput, list[list[int]]]:
        """Take one step with all rows that move; see `Batch`."""
        assert self.captured is not None, "prefill comes first"
        state, target = self.captured.state, self.graphs.target
        if target.needs_reread(longest):
            with torch.inference_mode():
                target.reread(state.tokens, state.length, state.active, self.captured.cache)
        lines = self.captured.replay().read()
        report: list[list[int]] = [[] for _ in self.block_tables]
        for row, line in zip(self._rows, lines, strict=False):
            report[row] = line
        output = self.captured.output
        if self._lengths is not None:
            proposer = self._lengths.next_proposer(output.levels, report)
            if proposer is not self.proposer:
                self._move(list(range(len(self._rows))), proposer)
        return output, report

    def keep(self, active: Sequence[bool]) -> None:
        """Let only the rows where `active` is true move from now on."""
        step = self.captured
        assert step is not None, "prefill comes first"
        if self._lengths is not None:
            self._lengths.set_active(active)
        left = [index for index, row in enumerate(self._rows) if active[row]]
        if self._proposer_for is None or not left or bucket(len(left)) == len(step.state.length):
            moving = torch.tensor([active[row] for row in self._rows])
            step.state.active[: len(moving)] = moving.to(step.state.active.device)
            return
        self._move(left, self.proposer if self._lengths is not None else self._proposer_for(len(left)))

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        """Give the memory back; `texts` holds the tokens that each row wrote."""
        if self.captured is not None:  # otherwise a prefill failed, and nothing says that its blocks hold the prompts
            # The last token that a row wrote is pending, or was never looked at; the one before it, a draft model may
            # have proposed and not read.
            unread = 1 if self.graphs.draft_store is None else 2
            self._publish([[*text, *new[:-unread]] for text, new in zip(self._texts, texts, strict=True)])
            self.graphs.give_back()
        self._release()

    def _move(self, indices: list[int], proposer: Proposer) -> None:
        """Go on in another captured step with the rows at these indices of this one."""
        step = self.captured
        assert step is not None, "prefill comes first"
        kept = torch.tensor(indices, device=step.state.length.device)
        state, table, sampler = step.state.at(kept), step.cache.table[kept], step.sampler.at(kept)
        self._rows = [self._rows[index] for index in indices]
        self.proposer = proposer
        self.graphs.give_back()
        self.captured = None
        self._load(state, table, sampler)

    def _load(self, state: State, table: Tensor, sampler: Sampler) -> None:
        self.captured = self.graphs.borrow(len(self._rows), self.proposer, self.request.sampler, self._width)
        self.captured.load(state, table, sampler)

    def _publish(self, texts: Sequence[Sequence[int]]) -> None:
        if self.graphs.draft_store is not None and self.proposer.model is None:
            return  # a draft model would find nothing of its own in these blocks
        with self.graphs.lock:
            for block_table, text, limit in zip(self.block_tables, texts, self.request.limits, strict=True):
                if self._is_steady(limit):
                    self.graphs.blocks.publish(block_table, text)

    def _is_steady(self, limit: int) -> bool:
        """Tell whether blocks of a row of up to `limit` tokens hold what any row with the same text would have."""
        steady = self.graphs.target.fixed_rope_context
        return steady is None or limit <= steady

    def _release(self) -> None:
        with self.graphs.lock:
            for block_table in self.block_tables:
                self.graphs.blocks.release(block_table)


def overshoot(proposer: Proposer) -> int:
    """Return how many positions past its limit a row may touch.

    Its last step may overshoot by K tokens; standing still, the row is then drafted for K further.
    """
    return 2 * proposer.depth + 1


def _read(output: StepOutput) -> list[list[int]]:
    """Read what the host must know, in the only read from the device in a step."""
    return output.pack_for_host().tolist()
