"""Replay speculative decoding along texts that the base wrote: a drafter's tokens per step without generating.

Along a text that the base wrote itself, the token that it draws next is known at every position: greedily, or under
the noise of a seed, which the drafter then searches under as well. So the trees that decoding would propose are made
for all positions at once, with decoding's own search, and the steps are counted afterwards, for many shapes of tree.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.drafting.proposer import State
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.stats import Stats
from redrafter.target.target import Target
from redrafter.train.evaluate.shapes import Shape, count_accepted
from redrafter.train.evaluate.texts import Texts, write_texts
from redrafter.train.teacher import Teacher

__all__ = ["ReplayStats", "ValidationTexts", "replay"]

MAX_BATCH_TEXTS = 16  # texts in one forward of the base
MAX_BATCH_POSITIONS = 1024  # positions in one call of the drafter
MAX_BATCH_BYTES = 1 << 30  # memory of either, about


@dataclass
class ReplayStats(Stats):
    """The steps along a text, counted as `generate` counts them.

    Attributes:
        tried: Entry d counts the steps that accepted d drafts and whose text went on, so that one more could be
            accepted.
    """

    tried: list[int] = field(default_factory=list)

    @classmethod
    def sum(cls, shape: Shape, parts: Iterable["ReplayStats"] = ()) -> "ReplayStats":
        """Add up the statistics of some texts, all replayed with `shape`; without any, return empty ones."""
        total = cls(accepted_by_depth=[0] * shape.depth, tried=[0] * shape.depth)
        for part in parts:
            for name in ("steps", "drafted", "accepted", "emitted"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for counts, more in ((total.accepted_by_depth, part.accepted_by_depth), (total.tried, part.tried)):
                counts[:] = (a + b for a, b in zip(counts, more, strict=True))
        return total

    @property
    def acceptance(self) -> list[float | None]:
        """Acceptance by depth.

        Entry d is the share that accepted a draft more, of the steps that accepted d drafts and could accept one more;
        None where there was no such step.
        """
        pairs = zip(self.accepted_by_depth, self.tried, strict=True)
        return [accepted / tried if tried else None for accepted, tried in pairs]

    def add_step(self, drafted: int, accepted: int, left: int) -> None:
        """Add one step.

        Args:
            drafted: Drafts that were verified.
            accepted: Drafts that were accepted.
            left: Tokens of the text behind the pending one.
        """
        self.count(drafted, accepted, min(accepted + 1, left))
        for depth in range(min(accepted + 1, left, len(self.tried))):
            self.tried[depth] += 1


class ValidationTexts:
    """Texts that a base wrote once, greedily, to measure any number of drafters on.

    Args:
        target: The base.
        prompts: Token ids of each prompt.
        new_tokens: Tokens that the base writes after each prompt, at most.
        end_ids: Ids that end a text; those of the generation config when None.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        new_tokens: int,
        end_ids: Collection[int] | None = None,
    ):
        self.target, self.texts = target, write_texts(target, prompts, new_tokens, end_ids=end_ids)

    @property
    def count(self) -> int:
        """Texts that hold a step, which are those that did not end with their first token."""
        return sum(len(continuation) > 1 for continuation in self.texts.continuations)

    def measure(self, drafter: RecurrentDrafter, shape: Shape) -> ReplayStats:
        """Replay all texts with a copy of a drafter in the base's dtype."""
        model = self.target.model
        served = copy.deepcopy(drafter).to(model.device, model.dtype).eval()
        return ReplayStats.sum(shape, replay(served, self.target, self.texts, [shape])[0])


@torch.inference_mode()
def replay(drafter: RecurrentDrafter, target: Target, texts: Texts, shapes: Sequence[Shape]) -> list[list[ReplayStats]]:
    """Compute what `generate` would report on texts that the base wrote.

    Args:
        drafter: Drafter in eval mode, on the target's device and in its dtype.
        target: The base.
        texts: Texts that the base wrote.
        shapes: Shapes of the tree.

    Returns:
        Statistics for each shape, for each text.
    """
    stats = [[ReplayStats.sum(shape) for _ in texts.tokens] for shape in shapes]
    for group in _groups(texts, target.vocab_size):
        accepted, drafted = (iter(x.tolist()) for x in _count_group(drafter, target, texts, group, shapes))
        for index in group:
            pending = range(texts.prompt_lengths[index], len(texts.tokens[index]) - 1)
            text_accepted, text_drafted = ([next(rows) for _ in pending] for rows in (accepted, drafted))
            for column, by_text in enumerate(stats):
                position = 0  # its token is pending: the prefill drew it
                while position < len(pending):
                    count = text_accepted[position][column]
                    by_text[index].add_step(text_drafted[position][column], count, len(pending) - position)
                    position += count + 1
    return stats


def _groups(texts: Texts, vocabulary: int) -> Iterator[list[int]]:
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


def _count_group(
    drafter: RecurrentDrafter, target: Target, texts: Texts, group: list[int], shapes: Sequence[Shape]
) -> tuple[Tensor, Tensor]:
    """Count drafts accepted and drafts verified at every position of a group of texts, `[A, shapes]` int64 each.

    The positions of a text are those where its token n is pending, for n from the prompt's length to the text's length
    - 2; they follow each other text by text.
    """
    depth, device = max(shape.depth for shape in shapes), target.device
    tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True, padding_value=-1)  # [B, T]
    hidden = _hidden(drafter, target, tokens.clamp(min=0).to(device))  # [B, T, F]
    anchors = [(b, n) for b, i in enumerate(group) for n in range(texts.prompt_lengths[i], len(texts.tokens[i]) - 1)]
    row, position = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1: past the end, drawn by nobody
    text = ahead[row[:, None], position[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    counts = [torch.zeros(2, 0, len(shapes), dtype=torch.long)]
    for part in torch.arange(len(row)).split(_batch_positions(target.vocab_size, shapes, texts.temperature > 0)):
        zero = torch.zeros(len(part), dtype=torch.long, device=device)
        before = hidden[row[part].to(device), position[part].to(device) - 1]  # [a, F]
        state = State(text[part].to(device), zero, before, zero == 0)
        sampler = Sampler(
            seeds=None if seeds is None else seeds[part].to(device),
            processors=(),
            temperature=torch.full_like(zero, texts.temperature or 1.0, dtype=torch.float32),
            prompt=zero,
            limit=zero,
            ids=torch.arange(target.vocab_size, device=device),
        )
        noise = sampler.noise(position[part].to(device) + 1, depth)  # [a, K, V]
        counts.append(count_accepted(drafter, target, state, sampler, noise, shapes).cpu())
    accepted, drafted = torch.cat(counts, dim=1)
    return accepted, drafted


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
