"""Unroll the drafter over given text as in drafting, and compute the loss of its predictions.

An anchor is a position i of the text: its hidden state h_i predicted the pending token x_{i+1}. Step k = 1..K reads the
embedding of x_{i+k} with (h_i, state) and predicts x_{i+k+1}. Its teacher is the base's own distribution there: its
logits at position i+k. The states of all K steps are computed first, since they do not depend on the predictions; then
`HeadLoss` computes the loss over the vocabulary in chunks: the logits of all steps of all anchors together would
dominate the memory of a training. Their gradient has a closed form, so each chunk's logits are turned into their
gradient, multiplied back into the gradients of the head and of its input, and freed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter.drafting.text_drafters import GivenTexts, TrainableDrafter
from redrafter.model.teacher import TeacherOutput
from redrafter.train.config import TrainConfig

DECAY = 0.9  # weight of each draft step relative to the one before; 0.8 gained no more than seeds differ

CHUNK_BYTES = 1 << 29  # of one float32 copy of a chunk's logits; a few copies are alive at once
# A trade-off on a CPU: a chunk's logits should stay in its cache, but each chunk also reads the whole head.
CHUNK_PREDICTIONS_ON_CPU = 256


class ChunkLoss(NamedTuple):
    """Loss and gradient of a chunk of C anchors."""

    gradient: Tensor  # gradient of the weighted loss in the logits, `[C, K, V']` float32
    loss: Tensor  # weighted sum of the losses, `[]`
    attempted: Tensor  # rollouts whose earlier steps were all correct, by step, `[K]`
    correct: Tensor  # how many of `attempted` were correct too, `[K]`


def chunk_loss(
    logits: Tensor, teacher: Tensor, position: Tensor, label: Tensor, weight: Tensor, distill: float
) -> ChunkLoss:
    """Compute the loss of a chunk of C anchors and its gradient in the logits.

    The loss of a step is `distill * KL(base || drafter) + (1 - distill) * CE(the text's token)`.

    Args:
        logits: Drafter's logits, `[C, K, V']`.
        teacher: Base's logits by flat position, `[P, V']`; indexed here, so that torch.compile makes no copy.
        position: Flat position whose logits teach each step, `[C, K]`.
        label: The text's own tokens, `[C, K]`; -1 outside the drafter's vocabulary, which disables cross-entropy.
        weight: Weight of each step, `[C, K]`; 0 for masked steps.
        distill: Weight of the distillation, from 0 to 1.
    """
    # In FP32: 16-bit softmax over a large vocabulary loses the small probabilities.
    log_q = logits.log_softmax(dim=-1, dtype=torch.float32)
    log_p = teacher[position].log_softmax(dim=-1, dtype=torch.float32)
    known = label >= 0  # [C, K]
    # Unknown labels use index 0; `known` removes their terms from loss and gradient.
    label = label.clamp(min=0)[:, :, None]
    label_log_q = log_q.gather(-1, label)  # [C, K, 1]
    counts = weight > 0
    correct = counts & known & ~(log_q > label_log_q).any(dim=-1)
    p, q = log_p.exp(), log_q.exp()
    soft, hard = distill * weight, (1 - distill) * known * weight  # [C, K]
    loss = (soft * (p * (log_p - log_q)).sum(dim=-1) - hard * label_log_q.squeeze(-1)).sum()
    # Closed form: the gradients in the logits are q - p and q - one_hot(label). Weights are multiplied first, and the
    # label's entry is written alone, since each operation over the vocabulary takes as long as any other.
    hard = hard[:, :, None]
    gradient = torch.addcmul(soft[:, :, None] * (q - p), hard, q)
    gradient.scatter_(-1, label, gradient.gather(-1, label) - hard)

    earlier = torch.ones_like(counts)
    earlier[:, 1:] = correct[:, :-1].cumprod(dim=1).bool()
    return ChunkLoss(gradient, loss, (earlier & counts).sum(0), (earlier & correct).sum(0))


def chunk_anchors(vocabulary: int, draft_len: int, device: torch.device) -> int:
    """Return how many anchors a chunk holds: `CHUNK_BYTES` of logits, or on a CPU `CHUNK_PREDICTIONS_ON_CPU`."""
    predictions = CHUNK_PREDICTIONS_ON_CPU if device.type == "cpu" else CHUNK_BYTES // (4 * vocabulary)
    return max(predictions // draft_len, 1)


class HeadLoss(torch.autograd.Function):
    """The weighted loss of A anchors, differentiable in inputs and heads; its gradient is computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        teacher: Tensor,
        position: Tensor,
        label: Tensor,
        weight: Tensor,
        distill: float,
        chunk: int,
        compute: Callable[..., ChunkLoss],
        *terms: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss.

        Args:
            ctx: Stores the gradients for `backward`.
            x: Input of the head, `[A, K, R]`.
            head: Weight of the head, `[V', R]`.
            teacher: As in `chunk_loss`, like the following arguments, but of all A anchors.
            position: `[A, K]`.
            label: `[A, K]`.
            weight: `[A, K]`.
            distill: As in `chunk_loss`.
            chunk: Anchors whose logits are in memory at once.
            compute: `chunk_loss`, compiled or not.
            terms: Further inputs and heads in turn, whose products are added to the logits.

        Returns the loss `[]`, and the counts `attempted` and `correct` of `ChunkLoss`, `[K]` each.
        """
        device = x.device.type
        # Custom autograd functions do not see autocast, so the dtype is applied by hand.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        inputs, heads = (x, *terms[::2]), (head, *terms[1::2])
        inputs_low, heads_low = ([factor.to(dtype) for factor in factors] for factors in (inputs, heads))
        input_gradients = [torch.empty_like(factor) for factor in inputs_low]
        learnt = (ctx.needs_input_grad[1], *ctx.needs_input_grad[10::2])  # the others are frozen
        head_gradients = [torch.zeros_like(h) if needed else None for h, needed in zip(heads, learnt, strict=True)]
        loss, steps = weight.new_zeros(()), x.shape[1]
        attempted, correct = (torch.zeros(steps, dtype=torch.long, device=x.device) for _ in range(2))
        # Gradients are computed here, in chunks: keeping all logits for the backward pass would not fit into memory.
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            products = [
                einsum(x_low[part], head_low, "c k r, v r -> c k v")
                for x_low, head_low in zip(inputs_low, heads_low, strict=True)
            ]
            logits = sum(products[1:], products[0])
            result = compute(logits, teacher, position[part], label[part], weight[part], distill)
            gradient = result.gradient.to(dtype)  # [C, K, V']
            flat = rearrange(gradient, "c k v -> v (c k)")
            for number, head_gradient in enumerate(head_gradients):
                input_gradients[number][part] = einsum(gradient, heads_low[number], "c k v, v r -> c k r")
                if head_gradient is not None:
                    head_gradient += flat @ rearrange(inputs_low[number][part], "c k r -> (c k) r")
            loss, attempted, correct = loss + result.loss, attempted + result.attempted, correct + result.correct
        pairs = zip(input_gradients, head_gradients, strict=True)
        ctx.gradients, ctx.dtypes = [gradient for pair in pairs for gradient in pair], [x.dtype for x in inputs]
        # The counts are for reports only.
        ctx.mark_non_differentiable(attempted, correct)
        return loss, attempted, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients computed by the forward."""
        pairs = zip(ctx.gradients[::2], ctx.gradients[1::2], ctx.dtypes, strict=True)
        ctx.gradients, scaled = None, []
        for x_gradient, head_gradient, dtype in pairs:
            # In place: a second copy of the head's gradient would be as large as the head.
            if head_gradient is not None:
                head_gradient.mul_(gradient)
            scaled += [x_gradient.to(dtype).mul_(gradient), head_gradient]
        return (*scaled[:2], *[None] * 7, *scaled[2:])


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

    def forward(self, tokens: Tensor, mask: Tensor, output: TeacherOutput, segment: Tensor | None = None) -> BatchLoss:
        """Compute the loss of a batch.

        Args:
            tokens: Token ids on the drafter's device, `[B, T]` int64.
            mask: True on tokens that the base generates, `[B, T]` bool; preferably on the CPU, to select anchors there.
            output: The base's outputs for `tokens`.
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
        features, embedding = (x.to(drafter.dtype) for x in (output.hidden, output.embedding))
        teacher = output.logits
        if drafter.draft_ids is not None:
            # A softmax over the selected logits renormalises the base's distribution to the drafter's ids.
            teacher = teacher.index_select(-1, drafter.draft_ids)

        given = GivenTexts(tokens, features, embedding, segment, anchors, position, output.table)
        flat = teacher.flatten(0, 1)
        (loss, attempted, correct), *others = [
            HeadLoss.apply(x, head, flat, position, label, weight, config.distill, chunk, self._compute, *terms)
            for x, head, *terms in map(output.fill_head, drafter.trained_heads(drafter.unroll(given)))
        ]
        return BatchLoss(sum((other[0] for other in others), loss), attempted, correct)
