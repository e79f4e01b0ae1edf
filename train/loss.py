"""The drafter unrolled over given text exactly as it drafts, and what is minimised.

An anchor is a position i of the text: its hidden state h_i predicted the pending token x_{i+1}. Step k = 1..K reads the
embedding of x_{i+k} with (h_i, state) and predicts x_{i+k+1}. Its teacher is the base's own distribution there: its
logits at position i+k.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, pad

from redrafter.drafter import RecurrentDrafter

__all__ = ["Unroll", "anchors", "step_loss", "targets"]


def targets(mask: Tensor, draft_len: int) -> Tensor:
    """Which predictions count. mask: `[B, T]` bool, the tokens that the base itself is to write.

    Returns `[B, T, K]` bool: step k from anchor i counts when all of x_{i+1} .. x_{i+k+1} are in the mask, because
    drafting starts at a token that the base wrote and never reaches past what it writes. So a 0 in the mask (a user's
    turn, padding, the start of another document) also ends the rollouts that come from before it.
    """
    ahead = pad(mask.long(), (0, draft_len + 1)).unfold(1, draft_len + 1, 1)[:, 1:]  # [B, T, K+1]: i+1 .. i+K+1
    return ahead.cumprod(dim=-1)[:, :, 1:].bool()


def anchors(mask: Tensor, draft_len: int, decay: float, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """The anchors of a batch, as flat positions `[A]` of `[B * T]`, and the weight of each of their steps, `[A, K]`.

    With the mask on the host, only anchors that have a target. On a device finding them would make the host wait: there
    all positions are taken, and those without a target weigh 0. Filled up with weight 0 to a multiple of `multiple`.
    """
    count = targets(mask, draft_len).flatten(0, 1)  # [B * T, K]
    every = torch.arange(len(count), device=count.device)
    chosen = every[count[:, 0]] if count.device.type == "cpu" else every
    weight = count[chosen] * decay ** torch.arange(draft_len, device=count.device)  # [A, K]
    rest = -len(chosen) % multiple
    return pad(chosen, (0, rest)), pad(weight, (0, 0, 0, rest))


def step_loss(logits: Tensor, teacher: Tensor, label: Tensor, distill: float) -> Tensor:
    """`distill * KL(teacher || drafter) + (1 - distill) * CE(label)`, `[C]`.

    logits, teacher: `[C, V']` float32. label: `[C]`, -1 where the drafter does not know the id: no cross-entropy there.
    """
    log_q = logits.log_softmax(dim=-1)  # [C, V']
    loss = torch.zeros_like(log_q[:, 0])
    if distill > 0:
        loss = loss + distill * kl_div(log_q, teacher.softmax(dim=-1), reduction="none").sum(dim=-1)
    if distill < 1:
        own = log_q.gather(1, label.clamp(min=0)[:, None]).squeeze(1)
        loss = loss - (1 - distill) * own * (label >= 0)
    return loss


class Unroll(nn.Module):
    """The loss of some anchors. A module of its own, so that distributed wrappers see one forward.

    A drafter with a reduced vocabulary is compared with the teacher restricted to its ids and normalised again.
    """

    def __init__(self, drafter: RecurrentDrafter, draft_len: int, distill: float, compiled: bool = False):
        super().__init__()
        self.drafter, self.draft_len, self.distill = drafter, draft_len, distill
        own = torch.arange(drafter.config.vocab_size)
        if isinstance(drafter.draft_ids, Tensor):
            known = drafter.draft_ids.cpu()
            own = torch.full_like(own, -1).scatter(0, known, torch.arange(len(known)))
        self.own: Tensor
        self.register_buffer("own", own, persistent=False)  # [V], the drafter's id of each of the target's, or -1
        self._run = torch.compile(self._sums) if compiled else self._sums

    def page(self, tokens: Tensor, hidden: Tensor, embedding: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        """What `forward` reads, by flat position of `[B * T]`: from tokens `[B, T]`, the base's hidden states and
        embeddings `[B, T, D]` and its logits `[B, T, V]`."""
        ids, dtype = self.drafter.draft_ids, self.drafter.dtype
        if isinstance(ids, Tensor):
            logits = logits.index_select(-1, ids)
        labels = self.own[tokens]
        return (
            hidden.flatten(0, 1).to(dtype),
            embedding.flatten(0, 1).to(dtype),
            logits.flatten(0, 1),
            labels.flatten(),
        )

    def forward(self, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of the losses of a chunk, and per step two counts `[2, K]`: rollouts whose earlier steps were
        all right, and those among them that were right again. Arguments: as `_sums`."""
        return self._run(*chunk)

    def _sums(
        self, anchors: Tensor, weight: Tensor, hidden: Tensor, embedding: Tensor, teacher: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """anchors: `[C]`. weight: `[C, K]`. The others, by flat position: `[P, D]`, `[P, D]`, `[P, V']`, `[P]`."""
        last = len(labels) - 1  # steps past the end weigh 0; they only must not index past it
        state, loss, right, counts = None, weight.new_zeros(()), weight[:, 0] > 0, []
        for k in range(1, self.draft_len + 1):
            here = (anchors + k).clamp(max=last)  # [C]
            logits, state = self.drafter(embedding[here], state, hidden[anchors])  # [C, V'], [C, D]
            logits = logits.float()
            label = labels[(anchors + k + 1).clamp(max=last)]  # [C]
            loss = loss + (weight[:, k - 1] * step_loss(logits, teacher[here].float(), label, self.distill)).sum()
            seen = right & (weight[:, k - 1] > 0)
            right = seen & (logits.argmax(dim=-1) == label)
            counts.append(torch.stack([seen.sum(), right.sum()]))
        return loss, torch.stack(counts, dim=1)
