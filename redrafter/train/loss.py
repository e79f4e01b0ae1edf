"""Unroll the drafter over given text as in drafting, and compute the loss of its predictions.

An anchor is a position i of the text: its hidden state h_i predicted the pending token x_{i+1}. Step k = 1..K reads the
embedding of x_{i+k} with (h_i, state) and predicts x_{i+k+1}. Its teacher is the base's own distribution there: its
logits at position i+k. The states of all K steps are computed first, since they do not depend on the predictions; then
`HeadLoss` computes the loss over the vocabulary in chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.drafting.text_drafters import GivenTexts, TrainableDrafter
from redrafter.model.teacher import TeacherOutput
from redrafter.train.config import TrainConfig
from redrafter.train.head_loss import HeadLoss, chunk_anchors, chunk_loss

DECAY = 0.9  # weight of each draft step relative to the one before; 0.8 gained no more than seeds differ


def target_mask(mask: Tensor, draft_len: int) -> Tensor:
    """Return the mask of predictions with a loss.

    Step k from anchor i has a loss if all of x_{i+1} .. x_{i+k+1} are in the mask, because drafting starts at a
    generated token and ends with the generation. So a 0 in the mask (a user's turn, padding, the start of another
    document) also ends the rollouts that start before it.

    `mask` is true on tokens that the base generates, `[B, T]` bool. Returns `[B, T, K]` bool.
    """
    ahead = pad(mask.long(), (0, draft_len + 1)).unfold(1, draft_len + 1, 1)[:, 1:]  # [B, T, K+1]: i+1 .. i+K+1
    return ahead.cumprod(dim=-1)[:, :, 1:].bool()


def find_anchors(mask: Tensor, draft_len: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Find the anchors of a batch and the weights of their steps.

    With the mask on the CPU, returns only anchors that have a target. On a GPU, finding them would make the host wait,
    so all positions are returned, and those without a target have weight 0.

    Args:
        mask: True on tokens that the base generates, `[B, T]` bool.
        draft_len: Draft steps K.
        multiple: Pad the anchors with weight 0 to a multiple of this number.

    Returns flat positions of the A anchors in `[B * T]`, `[A]` int64, and the weight of each of their steps, `[A, K]`.
    """
    count = target_mask(mask, draft_len).flatten(0, 1)  # [B * T, K]
    positions = torch.arange(len(count), device=count.device)
    anchors = positions[count[:, 0]] if count.device.type == "cpu" else positions
    weight = count[anchors] * DECAY ** torch.arange(draft_len, device=count.device)  # [A, K]
    rest = -len(anchors) % multiple
    return pad(anchors, (0, rest)), pad(weight, (0, 0, 0, rest))


def total_weight(mask: Tensor, config: TrainConfig) -> Tensor:
    """Return the sum of the weights of a batch's predictions, `[]`: the divisor of their mean loss."""
    return find_anchors(mask, config.draft_len)[1].sum()


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: Tensor  # weighted sum over the predictions, of both stages where the head has two, `[]`
    attempted: Tensor  # rollouts whose earlier steps were all correct, by step, `[K]`
    correct: Tensor  # how many of `attempted` were correct too, `[K]`


class Unroll(nn.Module):
    """Unrolls the drafter for K steps from every anchor and computes its loss, in one forward for distributed wrappers.

    For a drafter with a reduced vocabulary, the teacher's distribution is restricted to its ids and renormalised.
    """

    def __init__(self, drafter: TrainableDrafter, config: TrainConfig):
        super().__init__()
        self.drafter, self.config = drafter, config
        self.drafter_ids: Tensor
        # [V], the drafter's id of each of the base's ids, or -1
        # A buffer, so that it moves to the device with the module; derived from the drafter, so not saved.
        self.register_buffer("drafter_ids", drafter.index_ids().cpu(), persistent=False)
        self._compute = torch.compile(chunk_loss) if config.compile else chunk_loss

    def forward(
        self, tokens: Tensor, mask: Tensor, teacher_output: TeacherOutput, segment: Tensor | None = None
    ) -> BatchLoss:
        """Compute the loss of a batch.

        Args:
            tokens: Token ids on the drafter's device, `[B, T]` int64.
            mask: True on tokens that the base generates, `[B, T]` bool; preferably on the CPU, to select anchors there.
            teacher_output: The base's outputs for `tokens`.
            segment: Index of each token's text within its row, `[B, T]`; None for one text per row.
        """
        config, drafter, device = self.config, self.drafter, tokens.device
        chunk = chunk_anchors(drafter.config.num_draft_ids, config.draft_len, device)
        # Pad the anchors when compiled, so that all chunks have one size and compile once.
        anchors, weight = find_anchors(mask, config.draft_len, chunk if config.compile else 1)
        # Only after the selection above: it needs the mask on the CPU, where it does not wait for the device.
        anchors, weight = anchors.to(device, non_blocking=True), weight.to(device, non_blocking=True)  # [A], [A, K]
        labels = self.drafter_ids[tokens].flatten()
        last = len(labels) - 1  # steps past the end have weight 0, but their index must stay in range
        position = (anchors[:, None] + torch.arange(1, config.draft_len + 1, device=device)).clamp(max=last)  # [A, K]
        label = labels[(position + 1).clamp(max=last)]
        # The base may be in another dtype than the trained weights, which are FP32.
        features, embedding = (x.to(drafter.dtype) for x in (teacher_output.hidden, teacher_output.embedding))
        teacher = teacher_output.logits
        if drafter.draft_ids is not None:
            # A softmax over the selected logits renormalises the base's distribution to the drafter's ids.
            teacher = teacher.index_select(-1, drafter.draft_ids)

        given = GivenTexts(tokens, features, embedding, segment, anchors, position, teacher_output.table)
        flat = teacher.flatten(0, 1)
        (loss, attempted, correct), *others = [
            HeadLoss.apply(x, head, flat, position, label, weight, config.distill, chunk, self._compute, *terms)
            for x, head, *terms in map(teacher_output.fill_head, drafter.trained_heads(drafter.unroll(given)))
        ]
        return BatchLoss(sum((other[0] for other in others), loss), attempted, correct)
