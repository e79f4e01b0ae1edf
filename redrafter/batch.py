"""The rows of one request while they are decoded, on either kind of cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from redrafter.request import Request
from redrafter.step import Drawn, Proposer, prefill, step
from redrafter.target import Target

__all__ = ["Batch", "DenseBatch", "read", "room"]


class Batch(Protocol):
    """`prefill` once, then `step` after `step`, `close` at last."""

    proposer: Proposer  # of the next step
    depth: int  # the deepest that any proposer of this batch may draft

    def prefill(self) -> tuple[Drawn, list[list[int]]]:
        """Read the prompts. Returns what was drawn, and the same on the host: per row its tokens and, last, the
        accepted length."""

    def step(self, longest: int) -> tuple[Drawn, list[list[int]]]:
        """One step for all rows that move; the report of others says nothing. longest: committed tokens of the longest
        row."""

    def keep(self, active: Sequence[bool]) -> None:
        """From now on only these rows move."""

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        """Give the memory back. texts: what each row wrote."""


class DenseBatch:
    """On a cache of the batch's own, as large as its longest row: any device, any model that can be served at all."""

    def __init__(self, target: Target, proposer: Proposer, request: Request):
        self.target, self.proposer, self.request = target, proposer, request
        self.depth = proposer.depth
        self.cache: Any = target.new_cache(len(request.length))

    def prefill(self) -> tuple[Drawn, list[list[int]]]:
        request, longest = self.request, max(self.request.lengths)
        self.cache.reserve(longest)
        width = max(request.limits) + room(self.proposer)
        tokens = pad(request.prompts[:, :longest], (0, width - longest))
        self.state, drawn = prefill(tokens, request.length, self.target, self.cache, request.sampler, new=longest)
        return drawn, read(drawn)

    def step(self, longest: int) -> tuple[Drawn, list[list[int]]]:
        if len(self.request.length) == self.proposer.nodes == 1:
            self.cache.reserve_one(longest)
        else:
            self.cache.reserve(longest + self.proposer.depth + self.proposer.nodes)  # that overshoot
        self.state, drawn = step(self.state, self.proposer, self.target, self.cache, self.request.sampler)
        return drawn, read(drawn)

    def keep(self, active: Sequence[bool]) -> None:
        self.state = self.state.keep(torch.tensor(active, device=self.state.active.device))

    def close(self, texts: Sequence[Sequence[int]]) -> None:
        self.cache = None


def room(proposer: Proposer) -> int:
    """Positions that a row may touch past its limit: its last step may overshoot by K; standing still, it is then
    drafted for K further."""
    return 2 * proposer.depth + 1


def read(drawn: Drawn) -> list[list[int]]:
    """The only read from the device in a step."""
    return drawn.report().tolist()
