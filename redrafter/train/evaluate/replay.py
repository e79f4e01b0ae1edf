"""How many tokens a step would advance: what a drafter is worth, measured without generating.

Along a text that the base wrote itself, what the base draws next is known at every position: greedily, or under the
noise of a seed, which the drafter then searches under as well. So the trees that decoding would propose can be made for
all positions at once, with decoding's own search, and the steps walked afterwards, for many shapes of tree.
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
from redrafter.engine.outputs import Stats
from redrafter.sampling.sampler import Sampler
from redrafter.target.target import Target
from redrafter.train.evaluate.shapes import Shape, judge
from redrafter.train.evaluate.texts import Texts, written
from redrafter.train.teacher import Teacher

__all__ = ["HeldOut", "Walk", "walk"]

TEXTS = 16  # texts in one forward of the base, at most
POSITIONS = 1024  # positions in one call of the drafter, at most
BYTES = 1 << 30  # that either may take, about


@dataclass
class Walk(Stats):
    """The steps along a text, counted as `generate` counts them. tried: entry d counts the steps that accepted d drafts
    and whose text went on, so that one more could be."""

    tried: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, shape: Shape, parts: Iterable["Walk"] = ()) -> "Walk":
        """The sum of some walks with a shape; without any, one that has not begun."""
        total = cls(accepted_by_depth=[0] * shape.depth, tried=[0] * shape.depth)
        for part in parts:
            for name in ("steps", "drafted", "accepted", "emitted"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for mine, its in ((total.accepted_by_depth, part.accepted_by_depth), (total.tried, part.tried)):
                mine[:] = (a + b for a, b in zip(mine, its, strict=True))
        return total

    @property
    def acceptance(self) -> list[float | None]:
        """Entry d: of the steps that accepted d drafts and could accept one more, the share that did. None: of none."""
        pairs = zip(self.accepted_by_depth, self.tried, strict=True)
        return [accepted / tried if tried else None for accepted, tried in pairs]

    def step(self, drafted: int, accepted: int, left: int) -> None:
        """Add one step, with `left` tokens of the text behind its pending one."""
        self.count(drafted, accepted, min(accepted + 1, left))
        for depth in range(min(accepted + 1, left, len(self.tried))):
            self.tried[depth] += 1


class HeldOut:
    """Texts that a base wrote once, greedily, to be walked by as many drafters as there are."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        new_tokens: int,
        ends: Collection[int] | None = None,
    ):
        """As `written`."""
        self.target, self.texts = target, written(target, prompts, new_tokens, ends=ends)

    @property
    def count(self) -> int:
        """Texts that steps lead along: those that did not end with their first token."""
        return sum(len(own) > 1 for own in self.texts.own)

    def walk(self, drafter: RecurrentDrafter, shape: Shape) -> Walk:
        """What a drafter is worth on all of them, served in the base's dtype."""
        model = self.target.model
        served = copy.deepcopy(drafter).to(model.device, model.dtype).eval()
        return Walk.of(shape, walk(served, self.target, self.texts, [shape])[0])


@torch.inference_mode()
def walk(drafter: RecurrentDrafter, target: Target, texts: Texts, shapes: Sequence[Shape]) -> list[list[Walk]]:
    """What `generate` would report on texts that the base wrote, for each shape and each text.

    drafter: in eval mode, on the target's device and in its dtype.
    """
    walks = [[Walk.of(shape) for _ in texts.tokens] for shape in shapes]
    for group in _groups(texts, target.vocab_size):
        accepted, drafted = (iter(x.tolist()) for x in _judged(drafter, target, texts, group, shapes))
        for index in group:
            pendings = range(texts.starts[index], len(texts.tokens[index]) - 1)
            kept, sizes = ([next(found) for _ in pendings] for found in (accepted, drafted))
            for column, rows in enumerate(walks):
                place = 0  # the prefill drew the token that is pending there
                while place < len(pendings):
                    rows[index].step(sizes[place][column], kept[place][column], len(pendings) - place)
                    place += kept[place][column] + 1
    return walks


def _groups(texts: Texts, vocabulary: int) -> Iterator[list[int]]:
    """Indices of texts that the base reads together, of similar length."""
    group: list[int] = []
    for index in sorted(range(len(texts.tokens)), key=lambda index: len(texts.tokens[index])):
        logits = (len(group) + 1) * len(texts.tokens[index]) * vocabulary * 4
        if group and (len(group) == TEXTS or logits > BYTES):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _judged(
    drafter: RecurrentDrafter, target: Target, texts: Texts, group: list[int], shapes: Sequence[Shape]
) -> tuple[Tensor, Tensor]:
    """Drafts accepted and drafts verified, `[A, shapes]` each, when token n of a text is pending, for n = start ..
    length - 2, text by text."""
    depth, device = max(shape.depth for shape in shapes), target.device
    tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True, padding_value=-1)  # [B, T]
    hidden = _hidden(drafter, target, tokens.clamp(min=0).to(device))  # [B, T, F]
    anchors = [(b, n) for b, i in enumerate(group) for n in range(texts.starts[i], len(texts.tokens[i]) - 1)]
    row, place = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1: past the end, drawn by nobody
    text = ahead[row[:, None], place[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    found = [torch.zeros(2, 0, len(shapes), dtype=torch.long)]
    for part in torch.arange(len(row)).split(_positions(target.vocab_size, shapes, texts.temperature > 0)):
        zero = torch.zeros(len(part), dtype=torch.long, device=device)
        before = hidden[row[part].to(device), place[part].to(device) - 1]  # [a, F]
        state = State(text[part].to(device), zero, before, zero == 0)
        sampler = Sampler(
            seeds=None if seeds is None else seeds[part].to(device),
            processors=(),
            temperature=torch.full_like(zero, texts.temperature or 1.0, dtype=torch.float32),
            prompt=zero,
            limit=zero,
            ids=torch.arange(target.vocab_size, device=device),
        )
        noise = sampler.noise(place[part].to(device) + 1, depth)  # [a, K, V]
        found.append(judge(drafter, target, state, sampler, noise, shapes).cpu())
    accepted, drafted = torch.cat(found, dim=1)
    return accepted, drafted


def _hidden(drafter: RecurrentDrafter, target: Target, tokens: Tensor) -> Tensor:
    """What a drafter reads of the base at every token `[B, T]`: `[B, T, F]`."""
    with Teacher(target.model, drafter.config.target_layers) as teacher:
        return teacher.read(tokens).hidden


def _positions(vocabulary: int, shapes: Sequence[Shape], sampling: bool) -> int:
    """Positions in one call of the drafter: a search holds some copies of its beams' scores, and making noise takes
    several integers a number."""
    a_position = 16 * max(shape.beams for shape in shapes) + 32 * sampling * max(shape.depth for shape in shapes)
    compared = 4 * max(shape.lattice for shape in shapes) ** 2  # each node with all others
    return min(POSITIONS, max(1, BYTES // max(vocabulary * a_position, compared)))
