"""How many tokens a step would advance: what a drafter is worth, measured without generating.

Along a text that the base wrote itself, what the base draws next is known at every position: greedily, or under the
noise of a seed, which the drafter then searches under as well. So the trees that decoding would propose can be made for
all positions at once, with decoding's own search, and the steps walked afterwards, for many shapes of tree.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafter import RecurrentDrafter
from redrafter.options import EngineOptions
from redrafter.outputs import Stats
from redrafter.sampling import Sampler
from redrafter.step import State
from redrafter.target import Target
from redrafter.train.evaluate.shapes import Shape, judge
from redrafter.train.evaluate.texts import ROWS, Texts, written
from redrafter.train.teacher import Teacher

__all__ = ["HeldOut", "Walk", "greedy_texts", "walk", "walked"]

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
    """Texts that a base wrote once, at each of some temperatures, to be walked by as many drafters as there are."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        new_tokens: int,
        temperatures: Sequence[float] = (0.0,),
        seed: int = 0,
        *,
        ends: Iterable[int] | None = None,
        rows: int = ROWS,
        options: EngineOptions | None = None,
    ):
        """prompts: token ids. The other arguments are those of `written`."""
        self.target, ends = target, None if ends is None else list(ends)
        self.texts = [
            written(target, prompts, new_tokens, temperature, seed, ends=ends, rows=rows, options=options)
            for temperature in temperatures
        ]

    @property
    def count(self) -> int:
        """Texts at the first temperature that steps lead along: those that did not end with their first token."""
        return sum(len(own) > 1 for own in self.texts[0].own)

    def walk(self, drafter: RecurrentDrafter, shapes: Sequence[Shape]) -> list[list[Walk]]:
        """What a drafter is worth on them, served in the base's dtype: for each temperature, for each shape."""
        model = self.target.model
        served = copy.deepcopy(drafter).to(model.device, model.dtype).eval()
        every = [zip(shapes, walk(served, self.target, texts, shapes), strict=True) for texts in self.texts]
        return [[Walk.of(shape, rows) for shape, rows in found] for found in every]


def greedy_texts(target: Target, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Let the base write on from each prompt. Returns the texts, prompts included, and the prompts' lengths."""
    texts = written(target, prompts, new_tokens)
    return texts.tokens, texts.starts


def walked(
    drafter: RecurrentDrafter,
    target: Target,
    texts: list[list[int]],
    starts: list[int],
    beams: int,
    depth: int,
    nodes: int,
) -> Walk:
    """`walk` with one shape on texts written greedily, all texts together."""
    shape = Shape(beams, depth, nodes)
    return Walk.of(shape, walk(drafter, target, Texts(texts, starts, [False] * len(texts)), [shape])[0])


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
    return min(POSITIONS, max(1, BYTES // (vocabulary * a_position)))
