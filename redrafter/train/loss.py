"""The drafter unrolled over given text exactly as it drafts, and what is minimised.

An anchor is a position i of the text: its hidden state h_i predicted the pending token x_{i+1}. Step k = 1..K reads the
embedding of x_{i+k} with (h_i, state) and predicts x_{i+k+1}. Its teacher is the base's own distribution there: its
logits at position i+k. The states of all K steps come first, for they do not depend on what is predicted; then the
vocabulary, in chunks (see `head`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.train.config import TrainConfig
from redrafter.train.head_loss import Objective, chunk_anchors, chunk_loss, head_loss
from redrafter.train.teacher import TeacherOutput

__all__ = ["Losses", "Unroll", "anchors", "targets", "weight"]


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


def weight(mask: Tensor, config: TrainConfig) -> Tensor:
    """What the predictions of a batch weigh together, `[]`: its loss is a sum, and this makes a mean of it."""
    return anchors(mask, config.draft_len, config.decay)[1].sum()


@dataclass(frozen=True)
class Losses:
    """Of a batch. loss: `[]`, the weighted sum. seen, right: `[K]`, rollouts whose earlier steps were all right, and
    those among them that were right again."""

    loss: Tensor
    seen: Tensor
    right: Tensor


class Unroll(nn.Module):
    """The loss of a batch. A module of its own, so that distributed wrappers see one forward.

    A drafter with a reduced vocabulary is compared with the teacher restricted to its ids and normalised again.
    """

    def __init__(self, drafter: RecurrentDrafter, config: TrainConfig):
        super().__init__()
        self.drafter, self.config = drafter, config
        self.objective = Objective(config.distill, config.reach, drafter.config.draft_beams)
        own = torch.arange(drafter.config.vocab_size)
        if isinstance(drafter.draft_ids, Tensor):
            known = drafter.draft_ids.cpu()
            own = torch.full_like(own, -1).scatter(0, known, torch.arange(len(known)))
        self.own: Tensor
        self.register_buffer("own", own, persistent=False)  # [V], the drafter's id of each of the target's, or -1
        self._compute = torch.compile(chunk_loss) if config.compile else chunk_loss

    def forward(self, tokens: Tensor, mask: Tensor, reading: TeacherOutput) -> Losses:
        """tokens: `[B, T]`, on the drafter's device. mask: `[B, T]` bool, better on the host. reading: of tokens."""
        config, drafter, device = self.config, self.drafter, tokens.device
        chunk = self._chunk(device)
        # Compiled, all chunks have one size.
        chosen, weight = anchors(mask, config.draft_len, config.decay, chunk if config.compile else 1)
        chosen, weight = chosen.to(device, non_blocking=True), weight.to(device, non_blocking=True)  # [A], [A, K]
        labels = self.own[tokens].flatten()
        last = len(labels) - 1  # steps past the end weigh 0; they only must not index past it
        place = (chosen[:, None] + torch.arange(1, config.draft_len + 1, device=device)).clamp(max=last)  # [A, K]
        label = labels[(place + 1).clamp(max=last)]
        teacher = reading.logits
        if isinstance(drafter.draft_ids, Tensor):
            teacher = teacher.index_select(-1, drafter.draft_ids)

        embedding = reading.embedding.flatten(0, 1).to(drafter.dtype)
        hidden = drafter.fuse_hidden(reading.hidden.flatten(0, 1)[chosen].to(drafter.dtype))  # [A, D]
        state, read = None, []
        for k in range(config.draft_len):
            x, state = drafter.advance(embedding[place[:, k]], state, hidden)
            read.append(x)
        loss, seen, right = head_loss(
            torch.stack(read, dim=1),  # [A, K, R]
            drafter.lm_head.weight,
            teacher.flatten(0, 1),
            place,
            label,
            weight,
            self.objective,
            chunk,
            self._compute,
        )
        return Losses(loss, seen, right)

    def _chunk(self, device: torch.device) -> int:
        """Anchors in a chunk."""
        if self.config.chunk is not None:
            return max(self.config.chunk // self.config.draft_len, 1)
        return chunk_anchors(self.drafter.lm_head.out_features, self.config.draft_len, device)
