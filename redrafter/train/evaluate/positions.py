"""The positions of texts at which decoding may take a step, given to the drafter many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    hidden, remembered = _read_texts(drafter, target, tokens.clamp(min=0).to(device))
    anchors = [(b, n) for b, i in enumerate(group) for n in pending_positions(texts, i)]
    row, position = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1: past the end, drawn by nobody
    text = ahead[row[:, None], position[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    window_bytes = _window_bytes(drafter, tokens.shape[1], max(shape.beams for shape in shapes))
    batch = _batch_positions(target.vocab_size, shapes, texts.temperature > 0, window_bytes)
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
        window = None if remembered is None else _read_window(drafter, remembered, text_row, committed)
        yield Positions(State(text[part].to(device), zero, before, zero == 0), sampler, noise, window)


def _read_texts(
    drafter: RecurrentDrafter, target: Target, tokens: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Compute what a drafter reads of texts `[B, T]`.

    Returns:
        The hidden states at every token, `[B, T, F]`, and the keys and values, `[B, T, H, d]` each, of a drafter that
        attends to committed tokens; None for another.
    """
    with Teacher(target.model, drafter.config.target_layers) as teacher:
        output = teacher.read(tokens)
    if drafter.context is None:
        return output.hidden, None
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return output.hidden, drafter.context.remember(drafter.fuse_hidden(output.hidden), output.embedding, position)


def _read_window(
    drafter: RecurrentDrafter, remembered: tuple[Tensor, Tensor], row: Tensor, committed: Tensor
) -> ContextWindow:
    """Return what drafts read at positions of texts: the pairs up to the last committed token.

    Args:
        drafter: A drafter that attends to committed tokens.
        remembered: Keys and values of the texts, `[B, T, H, d]` each.
        row: Text of each position, `[a]` int64.
        committed: Tokens before the pending one, `[a]` int64.
    """
    keys, values = remembered
    size = min(drafter.config.context_window or 0, keys.shape[1] - 1)  # no text has more pairs
    return ContextWindow.read(committed, size, lambda at: (keys[row[:, None], at], values[row[:, None], at]))


def _window_bytes(drafter: RecurrentDrafter, length: int, beams: int) -> int:
    """Return the memory of a position's window: keys and values, copied once, and a search's scores of the pairs.

    Args:
        drafter: The drafter.
        length: Tokens of the longest text.
        beams: Beams of the widest search.
    """
    config = drafter.config
    stored = 4 * config.context_kv_heads * config.context_head_dim * drafter.dtype.itemsize
    return min(config.context_window or 0, length) * (stored + 12 * beams * config.context_heads)


def _batch_positions(vocabulary: int, shapes: Sequence[Shape], sampling: bool, window_bytes: int) -> int:
    """Return how many positions go through the drafter in one call.

    A search holds some copies of its beams' scores, and making noise takes several integers a number.
    """
    by_position = 16 * max(shape.beams for shape in shapes) + 32 * sampling * max(shape.depth for shape in shapes)
    compared = 4 * max(shape.lattice for shape in shapes) ** 2  # each node with all others
    return min(MAX_BATCH_POSITIONS, max(1, MAX_BATCH_BYTES // max(vocabulary * by_position, compared, window_bytes)))
