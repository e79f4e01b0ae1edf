"""The steps along texts: why the first missed draft of each was missed, and where misses are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.model.target import Target
from redrafter.train.evaluate.replay import (
    Positions,
    Shape,
    count_accepted,
    group_texts,
    pending_positions,
    read_positions,
    steps_taken,
)
from redrafter.train.evaluate.texts import Texts
from redrafter.train.teacher import Teacher

NEAR = 2  # times the beams: a rank below is a near miss


class Outcome(IntEnum):
    """What ended a step: a miss of one of four classes, the end of the draft, or the end of the text."""

    OUTSIDE_HEAD = 0
    NEAR_MISS = 1
    WRONG_GUESS = 2
    NODE_BUDGET = 3
    ALL_ACCEPTED = 4
    TEXT_ENDED = 5


MISSES = tuple(outcome for outcome in Outcome if outcome < Outcome.ALL_ACCEPTED)


@dataclass(frozen=True)
class Steps:
    """S steps that decoding takes along texts."""

    text: Tensor  # index of each step's text, `[S]` int64
    pending: Tensor  # position of its pending token in the text, `[S]` int64
    left: Tensor  # tokens of the text behind the pending one, `[S]` int64
    accepted: Tensor  # drafts that are accepted, `[S]` int64
    searched: Tensor  # drafts that would be accepted if all nodes of the search were verified, `[S]` int64
    # Rank of the token behind the accepted drafts among all that the drafter knows, after the accepted drafts; 0 for
    # the one that it likes best, -1 where it does not know the token; `[S]` int64.
    rank: Tensor


def rank_of(scores: Tensor, label: Tensor) -> Tensor:
    """Return how many scores `[A, V']` are above that of `label` `[A]` int64, `[A]`; -1 where the label is -1."""
    own = scores.gather(1, label.clamp(min=0)[:, None])
    return (scores > own).sum(dim=1).where(label >= 0, -1)


def classify(steps: Steps, beams: int, depth: int) -> Tensor:
    """Return the `Outcome` of each step, `[S]` int64: of the tests below, the last one that holds."""
    outcome = torch.full_like(steps.rank, Outcome.WRONG_GUESS)
    outcome[steps.rank < NEAR * beams] = Outcome.NEAR_MISS
    outcome[steps.searched > steps.accepted] = Outcome.NODE_BUDGET
    outcome[steps.rank < 0] = Outcome.OUTSIDE_HEAD
    outcome[steps.accepted == steps.left] = Outcome.TEXT_ENDED
    outcome[steps.accepted == depth] = Outcome.ALL_ACCEPTED
    return outcome


def count_misses(outcome: Tensor, accepted: Tensor, depth: int) -> Tensor:
    """Count the misses by depth and class.

    `outcome` holds the `Outcome` of each step, `[S]` int64, and `accepted` the drafts that it accepted, `[S]` int64.

    Returns:
        `[K, len(MISSES)]` int64; entry d is of draft d + 1.
    """
    missed = outcome < len(MISSES)
    cell = accepted[missed] * len(MISSES) + outcome[missed]
    return cell.bincount(minlength=depth * len(MISSES)).view(depth, len(MISSES))


def tried_drafts(steps: Steps, depth: int) -> tuple[Tensor, Tensor]:
    """Return the drafts that the steps tried: those that are accepted and the first that is not.

    What is behind the end of a text is not tried.

    Returns:
        The step of each of the D drafts, and its index in the draft from 0, `[D]` int64 each.
    """
    tried = (steps.accepted + 1).minimum(steps.left).clamp(max=depth)  # [S]
    step = torch.arange(len(tried)).repeat_interleave(tried)  # [D]
    return step, torch.arange(len(step)) - (tried.cumsum(0) - tried)[step]


def describe_drafts(steps: Steps, probabilities: Sequence[Tensor], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the drafts that the steps tried.

    `probabilities` holds what the base gave each token, `[T]` float32 for each text of T tokens.

    Returns:
        For each of D drafts: the probability of the text's token at its place, `[D]` float32; the tokens before it,
        `[D]` int64; whether it was accepted, `[D]` bool.
    """
    step, draft = tried_drafts(steps, depth)
    position = steps.pending[step] + 1 + draft  # also the tokens before it
    lengths = torch.tensor([len(text) for text in probabilities])
    starts = lengths.cumsum(0) - lengths
    probability = torch.cat(list(probabilities))[starts[steps.text[step]] + position]
    return probability, position, draft < steps.accepted[step]


def bucket_drafts(value: Tensor, accepted: Tensor, bounds: Sequence[float]) -> Tensor:
    """Count the drafts by a value of theirs, and those that are accepted.

    Args:
        value: Value of each draft, `[D]`.
        accepted: Whether each draft is accepted, `[D]` bool.
        bounds: Lowest value of each bucket but the first, rising.

    Returns:
        Drafts and accepted drafts, `[len(bounds) + 1, 2]` int64.
    """
    edges, count = torch.tensor(bounds, dtype=torch.float32), len(bounds) + 1
    bucket = torch.bucketize(value.float(), edges, right=True)  # [D]
    return torch.stack([bucket.bincount(minlength=count), bucket[accepted].bincount(minlength=count)], dim=1)


@torch.inference_mode()
def trace_steps(drafter: RecurrentDrafter, target: Target, texts: Texts, shape: Shape) -> Steps:
    """Take the steps that `replay` counts, and tell of each how its first missed draft was missed.

    The drafter must be in eval mode, on the target's device and in its dtype.
    """
    whole = replace(shape, nodes=shape.lattice)
    rows: list[list[int]] = []
    for group in group_texts(texts, target.vocab_size):
        found = []
        for part in read_positions(drafter, target, texts, group, [shape]):
            where = part.state, part.sampler, part.noise, [shape, whole], part.window
            accepted = count_accepted(drafter, target, *where)[0]  # [A, 2]
            missed = accepted[:, :1].clamp(max=shape.depth - 1)
            found.append(torch.cat([accepted, _ranks(drafter, target, part).gather(1, missed)], dim=1).cpu())  # [A, 3]
        columns = torch.cat(found)
        for index in group:
            pending = pending_positions(texts, index)
            own, columns = columns[: len(pending)], columns[len(pending) :]
            for step in steps_taken(own[:, 0].tolist()):
                rows.append([index, pending[step], len(pending) - step, *own[step].tolist()])
    table = torch.tensor(rows, dtype=torch.long).reshape(-1, len(fields(Steps)))
    return Steps(*table.unbind(1))


@torch.inference_mode()
def best_guess_share(drafter: RecurrentDrafter, target: Target, texts: Texts, depth: int) -> list[float | None]:
    """Return how often the drafter's best guess is the text's own token, after the text's own tokens before it.

    Every position of what follows the prompts counts, and no noise is shared, so texts of any origin can be compared.

    Args:
        drafter: Drafter in eval mode, on the target's device and in its dtype.
        target: The base.
        texts: Texts, whoever wrote them.
        depth: Drafts K from a position.

    Returns:
        The share at each depth, from 0 to 1; None where no text is long enough.
    """
    plain = replace(texts, temperature=0.0, seeds=None)
    right, count = torch.zeros(depth, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for group in group_texts(plain, target.vocab_size):
        for part in read_positions(drafter, target, plain, group, [Shape(1, depth, None)]):
            count += (part.state.tokens[:, 1:-1] >= 0).sum(dim=0).cpu()
            right += (_ranks(drafter, target, part) == 0).sum(dim=0).cpu()
    return [one / of if of else None for one, of in zip(right.tolist(), count.tolist(), strict=True)]


@torch.inference_mode()
def base_probabilities(target: Target, texts: Texts) -> list[Tensor]:
    """Compute how likely the base held each token of each text, at the texts' temperature; at 1 for greedy texts.

    Returns:
        For each text of T tokens, `[T]` float32; 1 for its first token.
    """
    found: dict[int, Tensor] = {}
    with Teacher(target.model) as teacher:
        for group in group_texts(texts, target.vocab_size):
            tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True)  # [B, T]
            logits = teacher.read(tokens.to(target.device)).logits  # [B, T, V]
            for row, index in enumerate(group):
                length = len(texts.tokens[index])
                scores = logits[row, : length - 1].float() / (texts.temperature or 1.0)
                own = tokens[row, 1:length, None].to(target.device)
                probability = scores.softmax(dim=-1).gather(1, own)[:, 0].cpu()
                found[index] = torch.cat([torch.ones(1), probability])
    return [found[index] for index in range(len(texts.tokens))]


def _ranks(drafter: RecurrentDrafter, target: Target, part: Positions) -> Tensor:
    """Rank the text's own tokens among the drafter's scores, as the search makes them, `[A, K]` int64.

    -1 stands for tokens that the drafter does not know, and for those past the end of the text.
    """
    return torch.stack(list(_ranks_by_depth(drafter, target, part)), dim=1)


def _ranks_by_depth(drafter: RecurrentDrafter, target: Target, part: Positions) -> Iterator[Tensor]:
    tokens, ids = part.state.tokens[:, :-1], drafter.draft_ids  # [A, K+1]
    label = drafter.index_ids()[tokens.clamp(min=0)].where(tokens >= 0, -1)
    start, carried = drafter.begin(drafter.fuse_hidden(part.state.hidden)[:, None]), None
    for k in range(tokens.shape[1] - 1):
        embedding = target.embedding(tokens[:, k : k + 1].clamp(min=0))
        read = None if part.window is None else partial(drafter.context, step=k, window=part.window)
        logits, carried = drafter.step(embedding, carried, start, read)
        yield rank_of(part.sampler.draft_scores(logits, part.noise, k, ids)[:, 0], label[:, k + 1])
