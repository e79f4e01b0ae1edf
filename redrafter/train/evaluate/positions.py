"""The positions of texts at which decoding may take a step, given to the drafter many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.context_attention import ContextWindow
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
        window: What the drafter reads of the texts there; None where it reads nothing.
    """

    state: State
    sampler: Sampler
    noise: Tensor | None
    window: ContextWindow | None


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
    with Teacher(target.model, drafter.config.target_layers) as teacher:
        read = teacher.read(tokens.clamp(min=0).to(device))
    hidden, remembered = read.hidden, None  # [B, T, F]
    if drafter.context is not None:  # keys and values, [B, T, H, d] each
        position = torch.arange(tokens.shape[1], device=device)
        remembered = drafter.context.remember(drafter.fuse_hidden(hidden), read.embedding, position)
    anchors = [(b, n) for b, i in enumerate(group) for n in pending_positions(texts, i)]
    row, position = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1: past the end, drawn by nobody
    text = ahead[row[:, None], position[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    # Memory of a position: a search holds some copies of its beams' scores, and making noise takes several integers a
    # number; each node is compared with all others; a window is keys and values, copied once, and scores of the pairs.
    config, beams, sampling = drafter.config, max(shape.beams for shape in shapes), texts.temperature > 0
    window_size = min(config.context_window or 0, tokens.shape[1])
    stored = 4 * config.context_kv_heads * config.context_head_dim * drafter.dtype.itemsize
    most_bytes = max(
        target.vocab_size * (16 * beams + 32 * sampling * depth),
        4 * max(shape.lattice for shape in shapes) ** 2,
        window_size * (stored + 12 * beams * config.context_heads),
    )
    batch = min(MAX_BATCH_POSITIONS, max(1, MAX_BATCH_BYTES // most_bytes))
    for part in torch.arange(len(row)).split(batch):
        zero = torch.zeros(len(part), dtype=torch.long, device=device)
        text_row, committed = row[part].to(device), position[part].to(device)  # [a] each
        before = hidden[text_row, committed - 1]  # [a, F]
        sampler = Sampler(
            seeds=None if seeds is None else seeds[part].to(device),
            processors=(),
            temperature=torch.full_like(zero, texts.temperature or 1.0, dtype=torch.float32),
            prompt=zero,
            limit=zero,
            ids=torch.arange(target.vocab_size, device=device),
        )
        noise = sampler.noise(committed + 1, depth)  # [a, K, V]
        window = None
        if remembered is not None:
            keys, values = remembered
            size = min(config.context_window or 0, keys.shape[1] - 1)  # no text has more pairs
            at_rows = partial(_pairs, keys, values, text_row[:, None])
            window = ContextWindow.read(committed, size, at_rows)
        yield Positions(State(text[part].to(device), zero, before, zero == 0), sampler, noise, window)


def _pairs(keys: Tensor, values: Tensor, row: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return keys[row, at], values[row, at]
