"""Replay speculative decoding along texts that the base wrote: a drafter's tokens per step without generating.

Along a text that the base wrote itself, the token that it draws next is known at every position: greedily, or under
the noise of a seed, which the drafter then searches under as well. So the trees that decoding would propose are made
for all positions at once, with decoding's own search, and the steps are counted afterwards, for many shapes of tree.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.scheduler.stats import Stats
from redrafter.target.target import Target
from redrafter.train.evaluate.positions import group_texts, pending_positions, read_positions
from redrafter.train.evaluate.shapes import Shape, count_accepted
from redrafter.train.evaluate.texts import Texts, write_texts

__all__ = ["ReplayStats", "ValidationTexts", "replay", "steps_taken"]


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
    for group in group_texts(texts, target.vocab_size):
        counts = [torch.zeros(2, 0, len(shapes), dtype=torch.long)]
        for part in read_positions(drafter, target, texts, group, shapes):
            counted = count_accepted(drafter, target, part.state, part.sampler, part.noise, shapes, part.window)
            counts.append(counted.cpu())
        accepted, drafted = (iter(x.tolist()) for x in torch.cat(counts, dim=1))
        for index in group:
            pending = pending_positions(texts, index)
            text_accepted, text_drafted = ([next(rows) for _ in pending] for rows in (accepted, drafted))
            for column, by_text in enumerate(stats):
                for position in steps_taken([row[column] for row in text_accepted]):
                    count, left = text_accepted[position][column], len(pending) - position
                    by_text[index].add_step(text_drafted[position][column], count, left)
    return stats


def steps_taken(accepted: Sequence[int]) -> Iterator[int]:
    """Yield the pending positions of a text at which decoding takes a step, counted from the first.

    Args:
        accepted: Drafts that a step would accept at each pending position of the text.
    """
    position = 0  # its token is pending: the prefill drew it
    while position < len(accepted):
        yield position
        position += accepted[position] + 1
