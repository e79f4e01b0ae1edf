"""The report of a step: the tokens of each row and counts of its drafts, in one tensor that the host reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter import kernels
from redrafter.tree.accept import Path, accept, acceptable_nodes
from redrafter.tree.token_tree import Tree


@dataclass(frozen=True)
class StepReport:
    """Holds what the host reads of a step of B rows in one tensor, which takes one copy. All properties are views.

    Attributes:
        packed: All of it, a line for each row, `[B, K+5]` int64.
    """

    packed: Tensor

    @property
    def tokens(self) -> Tensor:
        """Accepted drafts, then the token that the target drew, `[B, K+1]` int64; undefined past `accepted`."""
        return self.packed[:, :-4]

    @property
    def accepted(self) -> Tensor:
        """Number of accepted drafts, `[B]` int64."""
        return self.packed[:, -4]

    @property
    def drafted(self) -> Tensor:
        """Number of drafts verified, `[B]` int64; those below the row's `Sampler.draft_limits` are excluded."""
        return self.packed[:, -3]

    @property
    def finite(self) -> Tensor:
        """Number of leading tokens that were drawn from logits that are finite numbers, `[B]` int64."""
        return self.packed[:, -2]

    @property
    def copied(self) -> Tensor:
        """Number of accepted drafts that only the text itself had drafted, `[B]` int64."""
        return self.packed[:, -1]


def accept_drafts(
    tree: Tree,
    drawn: Tensor,
    finite: Tensor,
    texts: Tensor,
    length: Tensor,
    active: Tensor,
    max_depth: int,
    limits: Tensor | None = None,
) -> tuple[Path, StepReport, Tensor]:
    """Accept the drafts that hold, append the new tokens to each row's text, and report them.

    Args:
        tree: The verified tree.
        drawn: The target's own next token at every node, `[B, N]` int64.
        finite: 1 for each node whose draw was made from finite numbers, else 0, `[B, N]` int64.
        texts: Each row's text by position, `[B, T]` int64; written in place, past the new pending token too, where the
            next step overwrites it.
        length: Committed tokens of each row before the step, `[B]` int64.
        active: Rows that the step advances, `[B]` bool.
        max_depth: K, at least the depth of every node.
        limits: Levels of drafts that each row may keep, `[B]` int64; None for all.

    Returns:
        The accepted nodes, the report, and the committed tokens of each row after the step, `[B]` int64.
    """
    if kernels.TRITON and drawn.is_cuda:
        nodes, packed, after = kernels.accept.accept_drafts(
            tree.tokens, tree.parents, tree.depth, drawn, finite, texts, length, active,
            levels=tree.levels, width=max_depth + 1, grafted=tree.grafted, counts=tree.counts,
            limits=limits if tree.levels else None,
        )  # fmt: skip
        report = StepReport(packed)
        return Path(nodes, report.accepted), report, after
    acceptable = acceptable_nodes(tree, limits)  # [B, N]
    path = accept(tree, drawn, max_depth, acceptable)  # [B, K+1]
    tokens = drawn.gather(1, path.nodes)  # [B, K+1]
    texts.scatter_(1, length[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device), tokens)
    counts = [
        path.accepted,
        torch.full_like(length, tree.new - 1) if acceptable is None else acceptable.sum(1) - 1,
        finite.gather(1, path.nodes).cumprod(1).sum(1),
        (path.nodes >= tree.tokens.shape[1] - tree.grafted).sum(1),
    ]
    packed = torch.cat([tokens, torch.stack(counts, dim=1)], dim=1)
    return path, StepReport(packed), torch.where(active, length + path.accepted + 1, length)
