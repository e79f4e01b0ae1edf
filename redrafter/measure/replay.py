"""Replay speculative decoding on texts that the base generated, to count tokens per step without generating.

On such a text the base's next token is known at every position: the greedy one, or the one drawn with the noise of a
seed, which the drafter's search shares. So the trees of all positions are proposed in one batch, with the same search
as in decoding, and the steps are counted afterwards for many tree shapes.

The lattice of a deep search starts with the lattice of a shallower search of equal width, and a node budget keeps its
best nodes. So one search serves all shapes of one width. The kept nodes include all their ancestors, so of the path
that the base draws through the whole lattice, a prefix is kept.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.drafting.proposer import UNDRAFTED, State
from redrafter.drafting.text_drafters import TrainableDrafter
from redrafter.engine.engine import Engine
from redrafter.measure.decode import Texts, write_texts
from redrafter.model.target import Target
from redrafter.model.teacher import Teacher
from redrafter.sampling.sampler import Sampler
from redrafter.scheduler.sequence import Stats
from redrafter.tree.accept import accept
from redrafter.tree.sizes import TreeShape
from redrafter.tree.token_tree import Tree, hold_best

MAX_BATCH_TEXTS = 16  # texts in one forward of the base
MAX_BATCH_POSITIONS = 1024  # positions in one call of the drafter
MAX_BATCH_BYTES = 1 << 30  # memory of either, about


def name_tree(shape: TreeShape) -> str:
    """Return the name of a tree in reports.

    In replays a shape without a node budget is the tree of the published method: the prefixes of the W final beams.
    """
    if shape.node_budget is None:
        return f"{shape.beams}x{shape.depth}, final beams"
    return str(replace(shape, node_budget=min(shape.node_budget, shape.lattice)))


@dataclass(frozen=True)
class Positions:
    """Positions of texts in the form of a proposer's batch rows."""

    # State at A positions. Its `tokens` are `[A, K+2]`: each position's pending token and the following tokens of the
    # text; -1 past its end.
    state: State
    sampler: Sampler  # how the base sampled the texts
    noise: Tensor | None  # noise of the tokens after the pending one, `[A, K, V]`; None when greedy
    context: Any  # context that the drafter attends to; None for drafters without it


Measure: TypeAlias = Callable[[Positions], Tensor]


def count_accepted(drafter: TrainableDrafter, target: Target, at: Positions, shapes: Sequence[TreeShape]) -> Tensor:
    """Count accepted and verified drafts at A positions, `[2, A, shapes]` int64.

    The drafter must be in eval mode. The depth K of the positions is the maximum over the shapes.
    """
    state = at.state
    counts = torch.zeros(2, len(state.length), len(shapes), dtype=torch.long, device=state.tokens.device)
    # One search per width serves all depths and budgets of this width.
    for beams in {shape.beams for shape in shapes}:
        columns = [column for column, shape in enumerate(shapes) if shape.beams == beams]
        depth = max(shapes[column].depth for column in columns)
        # The search ranks each node by the sum of the drafter's log-probabilities, noise included, from the root to it.
        scores = [torch.zeros_like(state.length[:, None], dtype=torch.float32)]
        proposer = drafter.proposer(target, beams, depth, 1 + beams * depth, None, False)
        expand = proposer.scores(state, at.sampler, at.noise, at.context)
        lattice = proposer.grow(state, at.sampler, expand, scores.append)
        score = torch.cat(scores, dim=1)  # [A, N]
        # A node's acceptance does not depend on the rest of the tree, so one search serves all smaller trees.
        path = accept(lattice, state.tokens.gather(1, lattice.depth + 1), depth)  # [A, K+1]
        drawn = torch.arange(depth, device=score.device) < path.accepted[:, None]  # [A, K]
        for column in columns:
            kept = _kept(lattice, score, shapes[column])  # [A, N]
            within = slice(shapes[column].depth)
            accepted = kept.gather(1, path.nodes[:, 1:][:, within]) & drawn[:, within]
            counts[:, :, column] = torch.stack([accepted.sum(dim=1), kept.sum(dim=1) - 1])
    return counts


def _kept(lattice: Tree, score: Tensor, shape: TreeShape) -> Tensor:
    """Return the mask of nodes that a shape keeps of its lattice, a prefix of `lattice`: `[A, shape.lattice]`."""
    count = shape.lattice
    if shape.node_budget is None:
        # Without a budget, only the ancestors of the final beams are verified.
        return lattice.ancestors[:, count - shape.beams : count, :count].any(dim=1)
    if shape.beams == 1:  # rounding may put a node of a chain above its parent
        return (torch.arange(count, device=score.device) < shape.node_budget).expand(len(score), -1)
    tokens, parents, depth, score = (x[:, :count] for x in (lattice.tokens, lattice.parents, lattice.depth, score))
    *_, best, _ = hold_best(tokens, parents, depth, score, min(shape.node_budget, count), by_row=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)


def pending_positions(texts: Texts, index: int) -> range:
    """Return the positions of a text's possible pending tokens: from the first new token to the last but one."""
    return range(texts.prompt_lengths[index], len(texts.tokens[index]) - 1)


def group_texts(texts: Texts, vocabulary: int) -> Iterator[list[int]]:
    """Group the indices of texts of similar length into batches for the base."""
    # Similar lengths in one batch keep padding small; the logits dominate memory.
    group: list[int] = []
    # Texts of about the same length share a batch, to keep padding small.
    for index in sorted(range(len(texts.tokens)), key=lambda index: len(texts.tokens[index])):
        logit_bytes = (len(group) + 1) * len(texts.tokens[index]) * vocabulary * 4
        if group and (len(group) == MAX_BATCH_TEXTS or logit_bytes > MAX_BATCH_BYTES):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def read_positions(
    drafter: TrainableDrafter, target: Target, texts: Texts, group: list[int], shapes: Sequence[TreeShape]
) -> Iterator[Positions]:
    """Run the base on a group of texts, and yield their pending positions, text by text.

    `group` holds the indices of the texts. `shapes` are the trees searched at each position; K is their maximum depth.
    """
    depth, device = max(shape.depth for shape in shapes), target.device
    tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True, padding_value=-1)  # [B, T]
    # -1 only marks padding; the model needs valid ids there.
    ids = tokens.clamp(min=0).to(device)
    with Teacher(target.model, drafter.layers_read(target)) as teacher:
        read = teacher.read_batch(ids)
    # Read each text once for all of its positions, rather than once per position.
    hidden, contexts = read.hidden, drafter.read_texts(ids, read.hidden, read.embedding)  # [B, T, F]
    anchors = [(b, n) for b, i in enumerate(group) for n in pending_positions(texts, i)]
    row, position = torch.tensor(anchors, dtype=torch.long).reshape(-1, 2).unbind(1)  # [A] each
    ahead = pad(tokens, (0, depth + 1), value=-1)  # -1, past the end, matches no draft
    text = ahead[row[:, None], position[:, None] + torch.arange(depth + 2)]  # [A, K+2]
    seeds = None if texts.seeds is None else torch.tensor([texts.seeds[i] for i in group])[row]
    # Peak memory per position, the largest of: copies of the beams' scores and the integers that generate noise; the
    # ancestor matrix of the nodes; the drafter's context.
    beams, sampling = max(shape.beams for shape in shapes), texts.temperature > 0
    most_bytes = max(
        target.vocab_size * (16 * beams + 32 * sampling * depth),
        4 * max(shape.lattice for shape in shapes) ** 2,
        drafter.context_bytes(tokens.shape[1], beams),
    )
    batch = min(MAX_BATCH_POSITIONS, max(1, MAX_BATCH_BYTES // most_bytes))
    for part in torch.arange(len(row)).split(batch):
        zero = torch.zeros(len(part), dtype=torch.long, device=device)
        text_row, committed = row[part].to(device), position[part].to(device)  # [a] each
        # The drafter reads the hidden state that predicted the pending token.
        before = hidden[text_row, committed - 1]  # [a, F]
        sampler = Sampler(
            seeds=None if seeds is None else seeds[part].to(device),
            processors=(),
            temperature=torch.full_like(zero, texts.temperature or 1.0, dtype=torch.float32),
            prompt=zero,
            limit=zero,
            ids=torch.arange(target.vocab_size, device=device),
        )
        noise = sampler.noise(committed, depth)  # [a, K, V]
        context = None if contexts is None else contexts(text_row, committed)
        yield Positions(State(text[part].to(device), zero, before, zero == 0), sampler, noise, context)


def measure_positions(
    drafter: TrainableDrafter, target: Target, texts: Texts, shapes: list[TreeShape], measure: Measure
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each text and the result of `measure` at its P pending positions, `[P, ...]`, on the CPU.

    Takes the arguments of `read_positions`; the drafter must be in eval mode, on the target's device and in its
    dtype.
    """
    for group in group_texts(texts, target.vocab_size):
        found = torch.cat([measure(at).cpu() for at in read_positions(drafter, target, texts, group, shapes)])
        yield from zip(group, found.split([len(pending_positions(texts, index)) for index in group]), strict=True)


@dataclass
class ReplayStats(Stats):
    """Statistics of the steps on a text, defined as in `generate`."""

    # Entry d counts the steps that accepted d drafts and whose text continued, so that one more could be accepted.
    tried: list[int] = field(default_factory=list)

    @classmethod
    def sum(cls, shape: TreeShape, parts: Iterable["ReplayStats"] = ()) -> "ReplayStats":
        """Sum the statistics of texts that were replayed with `shape`; returns zeros for none."""
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

        Entry d is the fraction that accepted one more draft, of the steps that accepted d drafts and could accept more;
        None if there is no such step.
        """
        pairs = zip(self.accepted_by_depth, self.tried, strict=True)
        return [accepted / tried if tried else None for accepted, tried in pairs]

    def add_step(self, drafted: int, accepted: int, left: int) -> None:
        """Add a step that verified `drafted` drafts and accepted `accepted`, `left` tokens before the text's end."""
        self.count(drafted, accepted, min(accepted + 1, left))
        for depth in range(min(accepted + 1, left, len(self.tried))):
            self.tried[depth] += 1


class ValidationTexts:
    """Texts that a base generates once, greedily and sampled, to measure any number of drafters.

    They continue `prompts`, token ids, by at most `tokens` tokens each. `end_ids` end a text; None uses the
    generation config's.
    """

    def __init__(self, target: Target, prompts: list[list[int]], tokens: int, end_ids: Collection[int] | None = None):
        self.target, self.prompts, self.new_tokens, self.end_ids = target, prompts, tokens, end_ids
        self.texts = self._write()
        self._sampled: dict[int, Texts] = {}  # by seed

    @property
    def count(self) -> int:
        """Number of texts with at least one step, which did not end with their first token."""
        return sum(len(continuation) > 1 for continuation in self.texts.continuations)

    def sampled(self, seed: int) -> Texts:
        """Return texts of a seed from the same prompts at temperature 1, generated by the first call."""
        if seed not in self._sampled:
            self._sampled[seed] = self._write(1.0, seed)
        return self._sampled[seed]

    def _write(self, *sampling: Any) -> Texts:
        engine = Engine(self.target, UNDRAFTED)  # not kept, as a training needs its memory
        return write_texts(engine, self.prompts, self.new_tokens, *sampling, end_ids=self.end_ids)

    def measure(self, drafter: TrainableDrafter, shape: TreeShape, seed: int | None = None) -> ReplayStats:
        """Replay the greedy texts with a copy of a drafter in the base's dtype; with a seed, the sampled ones."""
        return self.measure_all(drafter, [shape], self.texts if seed is None else self.sampled(seed))[0]

    def measure_all(self, drafter: TrainableDrafter, shapes: list[TreeShape], texts: Texts) -> list[ReplayStats]:
        """Replay some texts for each shape with a copy of a drafter in the base's dtype."""
        model = self.target.model
        # A float32 drafter in training is measured in the base's dtype, in which it is served.
        served = copy.deepcopy(drafter).to(model.device, model.dtype).eval()
        by_shape = zip(shapes, replay(served, self.target, texts, shapes), strict=True)
        return [ReplayStats.sum(shape, stats) for shape, stats in by_shape]


@torch.inference_mode()
def replay(drafter: TrainableDrafter, target: Target, texts: Texts, shapes: list[TreeShape]) -> list[list[ReplayStats]]:
    """Compute the statistics that `generate` would report on texts that the base generated.

    The drafter must be in eval mode, on the target's device and in its dtype. Returns statistics by shape, then by
    text.
    """
    stats = [[ReplayStats.sum(shape) for _ in texts.tokens] for shape in shapes]

    def count(at: Positions) -> Tensor:
        return count_accepted(drafter, target, at, shapes).movedim(1, 0)  # [A, 2, shapes]

    for index, counts in measure_positions(drafter, target, texts, shapes, count):
        for by_text, (accepted, drafted) in zip(stats, counts.permute(2, 1, 0).tolist(), strict=True):
            for position in steps_taken(accepted):
                by_text[index].add_step(drafted[position], accepted[position], len(accepted) - position)
    return stats


def steps_taken(accepted: Sequence[int]) -> Iterator[int]:
    """Yield the pending positions of a text at which decoding runs a step, relative to the first.

    `accepted` is the number of drafts that a step would accept at each pending position.
    """
    position = 0  # the prefill drew this pending token
    while position < len(accepted):
        yield position
        position += accepted[position] + 1
