"""The steps along texts, with what the search and the drafter thought of each text's own tokens."""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.target.target import Target
from redrafter.train.evaluate.misses import Steps, rank_of
from redrafter.train.evaluate.positions import Positions, group_texts, pending_positions, read_positions
from redrafter.train.evaluate.replay import steps_taken
from redrafter.train.evaluate.shapes import Shape, count_accepted
from redrafter.train.evaluate.texts import Texts
from redrafter.train.teacher import Teacher

__all__ = ["base_probabilities", "best_guess_share", "trace_steps"]


@torch.inference_mode()
def trace_steps(drafter: RecurrentDrafter, target: Target, texts: Texts, shape: Shape) -> Steps:
    """Take the steps that `replay` counts, and tell of each how its first missed draft was missed.

    Args:
        drafter: Drafter in eval mode, on the target's device and in its dtype.
        target: The base.
        texts: Texts that the base wrote.
        shape: Shape of the tree.
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
        read = None if part.window is None else partial(drafter.read_context, k, part.window)
        logits, carried = drafter.step(embedding, carried, start, read)
        yield rank_of(part.sampler.draft_scores(logits, part.noise, k, ids)[:, 0], label[:, k + 1])
