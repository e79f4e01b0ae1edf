"""The positions of texts at which decoding may take a step, given to the drafter many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.train.evaluate.shapes import Shape
from redrafter.train.evaluate.texts import Texts
from redrafter.train.teacher import Teacher

__all__ = ["Positions", "group_texts", "pending_positions", "read_positions"]

MAX_BATCH_TEXTS = 16  # texts in one forward of the base
MAX_BATCH_POSITIONS = 1024  # positions in one call of the drafter
MAX_BATCH_BYTES = 1 << 30  # memory of either, about


@dataclass(frozen=True)
class Positions:
    """Positions of texts, as a proposer is given the rows of a batch.

    Attributes:
        state: State at A positions. Its `tokens` are `[A, K+2]`, each position's pending token and the tokens that
            the text goes on with; -1 past its end.
        sampler: How the base sampled the texts.
        noise: Noise of the tokens after the pending one, `[A, K, V]`; None when greedy.
    """

    state: State
    sampler: Sampler
    noise: Tensor | None


def pending_positions(texts: Texts, index: int) -> range:
    """Return where a token of a text may be pending: at the first that the base wrote, to the last but one."""
    return range(texts.prompt_lengths[index], len(texts.tokens[index]) - 1)


def group_texts(texts: Texts, vocabulary: int) -> Iterator[list[int]]:
    """Group the indices of texts of similar length that go through the base together."""
    group: list[int] = []
    for index in sorted(range(len(texts.tokens)), key=lambda index: len(texts.tokens[index])):
        logit_bytes = (len(group) + 1) * len(texts.tokens[index]) * vocabulary * 4
        if group and (len(group) == MAX_BATCH_TEXTS or logit_bytes > MAX_BATCH_BYTES):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def read_positions(
    drafter: RecurrentDrafter, target: Target, texts: Texts, group: list[int], shapes: Sequence[Shape]
) -> Iterator[Positions]:
    """Read a group of texts with the base, and yield their pending positions, text by text.

    Args:
        drafter: Drafter, in eval mode.
        target: The base.
        texts: All texts.
        group: Indices of the texts to read.
        shapes: Shapes of the trees that are searched at each position; K is the depth of the deepest.
    """
    depth, device = max(shape.depth for shape in shapes), target.device
    tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True, padding_value=-1)  # [B, T]
    hidden = _hidden(drafter, target, tokens.clamp(min=0).to(device))  # [B, T, F]
    anchors = [(b, n) for b, i in enumerate(group) for n in pending_positions(texts, i)]
    row, position = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1: past the end, drawn by nobody
    text = ahead[row[:, None], position[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    for part in torch.arange(len(row)).split(_batch_positions(target.vocab_size, shapes, texts.temperature > 0)):
        zero = torch.zeros(len(part), dtype=torch.long, device=device)
        before = hidden[row[part].to(device), position[part].to(device) - 1]  # [a, F]
        sampler = Sampler(
            seeds=None if seeds is None else seeds[part].to(device),
            processors=(),
            temperature=torch.full_like(zero, texts.temperature or 1.0, dtype=torch.float32),
            prompt=zero,
            limit=zero,
            ids=torch.arange(target.vocab_size, device=device),
        )
        noise = sampler.noise(position[part].to(device) + 1, depth)  # [a, K, V]
        yield Positions(State(text[part].to(device), zero, before, zero == 0), sampler, noise)


def _hidden(drafter: RecurrentDrafter, target: Target, tokens: Tensor) -> Tensor:
    """Compute the hidden states that a drafter reads at every token `[B, T]`: `[B, T, F]`."""
    with Teacher(target.model, drafter.config.target_layers) as teacher:
        return teacher.read(tokens).hidden


def _batch_positions(vocabulary: int, shapes: Sequence[Shape], sampling: bool) -> int:
    """Return how many positions go through the drafter in one call.

    A search holds some copies of its beams' scores, and making noise takes several integers a number.
    """
    by_position = 16 * max(shape.beams for shape in shapes) + 32 * sampling * max(shape.depth for shape in shapes)
    compared = 4 * max(shape.lattice for shape in shapes) ** 2  # each node with all others
    return min(MAX_BATCH_POSITIONS, max(1, MAX_BATCH_BYTES // max(vocabulary * by_position, compared)))
