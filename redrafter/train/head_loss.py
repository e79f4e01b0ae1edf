"""The loss over the vocabulary, a chunk of predictions at a time, and its gradient with it.

Logits of all K steps of all anchors at once would be most of the memory of a training. Their gradient has a closed
form, so each chunk's logits are turned into it, multiplied back, and forgotten: nothing over the vocabulary is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

__all__ = ["Objective", "chunk_anchors", "chunk_loss", "head_loss"]

# Of one float32 copy of a chunk's logits, of which a few are alive at once. A CPU is fastest where they stay in its
# cache, but each chunk also passes over the whole head.
CHUNK_BYTES, CHUNK_ON_CPU = 1 << 29, 256


class Objective(NamedTuple):
    """What is minimised: `distill * KL(base || drafter) + (1 - distill) * CE(own token)`.

    reach: by how much, from 0 to 1, a step weighs less where a token before it in the rollout would not have been among
    the drafter's `beams` likeliest, so that drafting would not have come there.
    """

    distill: float
    reach: float
    beams: int


class Chunk(NamedTuple):
    """Of C anchors: gradient of the weighted loss in the logits `[C, K, V']`, float32; the weighted loss `[]`; and
    counts `[K]` of rollouts whose earlier steps were all right, and of those that were right again."""

    gradient: Tensor
    loss: Tensor
    seen: Tensor
    right: Tensor


def chunk_loss(
    logits: Tensor, teacher: Tensor, place: Tensor, label: Tensor, weight: Tensor, objective: Objective
) -> Chunk:
    """logits: `[C, K, V']`. teacher: `[P, V']`; place: `[C, K]`, where in it to look, which is done here because a
    compiler then makes no copy. label: `[C, K]`, the text's own ids, -1 where the drafter does not know one: no
    cross-entropy there. weight: `[C, K]`, 0 where a step does not count."""
    distill, reach, beams = objective
    log_q = logits.log_softmax(dim=-1, dtype=torch.float32)
    log_p = teacher[place].log_softmax(dim=-1, dtype=torch.float32)
    q, p = log_q.exp(), log_p.exp()
    known = label >= 0  # [C, K]
    label = label.clamp(min=0)[:, :, None]
    own = log_q.gather(-1, label)  # [C, K, 1]
    rank = (log_q > own).sum(dim=-1)  # [C, K], 0 for the likeliest
    counts = weight > 0

    drafted = known & (rank < beams)
    reached = torch.ones_like(weight)
    reached[:, 1:] = drafted[:, :-1].to(weight).cumprod(dim=1)
    weight = weight * (1 - reach + reach * reached)
    hard = (1 - distill) * known  # [C, K], weight of the cross-entropy
    loss = distill * (p * (log_p - log_q)).sum(dim=-1) - hard * own.squeeze(-1)
    is_label = torch.arange(log_q.shape[-1], device=label.device) == label
    gradient = (distill + hard)[:, :, None] * q - distill * p - torch.where(is_label, hard[:, :, None], 0.0)

    right = counts & known & (rank == 0)
    earlier = torch.ones_like(counts)
    earlier[:, 1:] = right[:, :-1].cumprod(dim=1).bool()
    return Chunk(
        gradient * weight[:, :, None], (loss * weight).sum(), (earlier & counts).sum(0), (earlier & right).sum(0)
    )


def head_loss(
    x: Tensor,
    head: Tensor,
    teacher: Tensor,
    place: Tensor,
    label: Tensor,
    weight: Tensor,
    objective: Objective,
    chunk: int,
    compute: Callable[..., Chunk] = chunk_loss,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss `[]` of `A` anchors, differentiable in x and head, and the counts `[K]` of `Chunk`.

    x: `[A, K, R]`, what the head reads. head: `[V', R]`, its weight. teacher: `[P, V']`, logits of the base by flat
    position. place: `[A, K]`, the position that predicts what step k is to. label, weight: `[A, K]`. chunk: anchors
    whose logits are in memory at once. compute: `chunk_loss`, compiled or not.
    """
    return _HeadLoss.apply(x, head, teacher, place, label, weight, objective, chunk, compute)


def chunk_anchors(vocabulary: int, draft_len: int, device: torch.device) -> int:
    """Anchors in a chunk: of `CHUNK_BYTES`, or on a CPU of `CHUNK_ON_CPU` predictions."""
    predictions = CHUNK_ON_CPU if device.type == "cpu" else CHUNK_BYTES // (4 * vocabulary)
    return max(predictions // draft_len, 1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        teacher: Tensor,
        place: Tensor,
        label: Tensor,
        weight: Tensor,
        objective: Objective,
        chunk: int,
        compute: Callable[..., Chunk],
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        x_low, head_low = x.to(dtype), head.to(dtype)
        into_x, into_head = torch.empty_like(x_low), torch.zeros_like(head)
        loss, steps = weight.new_zeros(()), x.shape[1]
        seen, right = (torch.zeros(steps, dtype=torch.long, device=x.device) for _ in range(2))
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = einsum(x_low[part], head_low, "c k r, v r -> c k v")
            found = compute(logits, teacher, place[part], label[part], weight[part], objective)
            gradient = found.gradient.to(dtype)  # [C, K, V']
            into_x[part] = einsum(gradient, head_low, "c k v, v r -> c k r")
            flat = rearrange(gradient, "c k v -> v (c k)")
            into_head += flat @ rearrange(x_low[part], "c k r -> (c k) r")
            loss, seen, right = loss + found.loss, seen + found.seen, right + found.right
        ctx.gradients, ctx.dtype = (into_x, into_head), x.dtype
        ctx.mark_non_differentiable(seen, right)
        return loss, seen, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        into_x, into_head = ctx.gradients
        ctx.gradients = None
        # In place: a second copy of the head's would be as large as the head.
        return (into_x.to(ctx.dtype).mul_(gradient), into_head.mul_(gradient), *[None] * 7)
