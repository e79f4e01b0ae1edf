"""Explain how many drafts of a pair are accepted: why steps ended, and what the acceptance depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from redrafter.app.loading import Pair
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.text_drafters import ReplayableDrafter
from redrafter.model.target import Target
from redrafter.train.evaluate.options import EvaluateOptions
from redrafter.train.evaluate.replay import (
    Positions,
    ReplayStats,
    count_accepted,
    group_texts,
    measure_positions,
    name_tree,
    pending_positions,
    read_positions,
    replay,
    steps_taken,
)
from redrafter.train.evaluate.texts import PromptSource, Texts, read_training_texts, write_texts
from redrafter.train.teacher import Teacher
from redrafter.tree.beam_search import Candidates
from redrafter.tree.sizes import TreeShape

PROBABILITIES, PROBABILITY_NAMES = (0.5, 0.9), ("below 0.5", "0.5 to 0.9", "0.9 or more")
CONTEXTS = (256, 512, 1024, 2048, 8192)  # tokens
CONTEXT_NAMES = (*(f"up to {most}" for most in CONTEXTS), f"above {CONTEXTS[-1]}")
NEAR = 2  # times the beams: a rank below is a near miss


@dataclass(frozen=True)
class OtherTexts:
    """Holds the texts that an evaluation is compared with, which are read before anything is measured."""

    training: Texts | None  # texts of the drafter's training data; None if none was given
    has_temperature: bool  # whether their rows record the temperature that a base wrote them at
    plain: list[list[int]]  # token ids of some prompts as plain text; none without a chat template
    templated: list[list[int]]  # token ids of the same prompts in the chat template

    @classmethod
    def load(cls, pair: Pair, options: EvaluateOptions, max_tokens: int) -> "OtherTexts":
        """Read the texts for a pair, with prompts of `max_tokens` tokens at most; raises as the readers do."""
        target, training, has_temperature = pair.engine.target, None, False
        if options.data:
            limits = target.vocab_size, target.fixed_rope_context
            training, has_temperature = read_training_texts(
                options.data, pair.tokenizer, *limits, options.seed, options.written_temperatures
            )
        source = PromptSource(options.prompts, pair.tokenizer, seed=options.seed, **options.cut)
        return cls(training, has_temperature, *source.in_both_forms(max_tokens))


def explain(
    pair: Pair,
    drafter: ReplayableDrafter,
    options: EvaluateOptions,
    shape: TreeShape,
    categories: dict[str, int],
    texts: Sequence[Texts],
    others: OtherTexts,
) -> dict[str, Any]:
    """Explain the acceptance of a pair, as the JSON document has it.

    `categories` holds the number of prompts of each category; the texts are in the order of the categories. In what is
    returned, `best_guess_on_data` is None without training data; `plain` and `template` without a chat template. The
    data compare with the base's text at `data_temperature`.
    """
    target = pair.engine.target
    on_data = None
    if others.training is not None:
        on_data = best_guess_share(drafter, target, others.training, shape.depth)
    plain, template = (
        _measure_form(pair, drafter, options, shape, prompts) if prompts else None
        for prompts in (others.plain, others.templated)
    )
    return {
        "tree": name_tree(shape),
        "beams": shape.beams,
        "depth": shape.depth,
        "nodes": shape.node_budget,  # that are verified, the root counted
        "lattice": shape.lattice,  # nodes that the search finds, the root counted
        "head": drafter.config.draft_vocab_size or target.vocab_size,  # tokens that the drafter's head knows
        "vocabulary": target.vocab_size,
        "temperatures": [explain_temperature(drafter, target, written, shape, categories) for written in texts],
        "data": list(options.data),
        "best_guess_on_data": on_data,
        "data_has_temperature": others.has_temperature,
        "data_temperature": None if others.training is None else others.training.temperature,
        "form_prompts": len(others.plain),
        "plain": plain,
        "template": template,
    }


def explain_temperature(
    drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape, categories: dict[str, int]
) -> dict[str, Any]:
    """Explain the acceptance along the texts of one temperature; the arguments are those of `explain`."""
    steps = trace_steps(drafter, target, texts, shape)
    sizes = torch.tensor(list(categories.values()))
    category = torch.arange(len(sizes)).repeat_interleave(sizes)[steps.text]  # [S]
    probability, context, accepted = describe_drafts(steps, base_probabilities(target, texts), shape.depth)
    emitted = int((steps.accepted + 1).minimum(steps.left).sum())
    bounds = torch.tensor(CONTEXTS) + 1
    return {
        "temperature": texts.temperature,  # 0 for greedy
        "tokens_per_step": emitted / len(category) if len(category) else None,
        "all_steps": _count_steps(steps, shape, category >= 0),
        "categories": {name: _count_steps(steps, shape, category == index) for index, name in enumerate(categories)},
        # Drafts by the probability that the base gave its own token, and by the tokens before them.
        "by_probability": bucket_drafts(PROBABILITY_NAMES, probability, accepted, torch.tensor(PROBABILITIES)),
        "by_context": bucket_drafts(CONTEXT_NAMES, context, accepted, bounds),
        # At each depth, the share of the base's own text at which the drafter's best guess was right, each after the
        # text's own tokens and without noise.
        "best_guess": best_guess_share(drafter, target, texts, shape.depth),
    }


def _count_steps(steps: "Steps", shape: TreeShape, chosen: Tensor) -> dict[str, Any]:
    """Count how the steps `chosen` `[S]` bool ended."""
    outcome, accepted = classify(steps, shape.beams, shape.depth)[chosen], steps.accepted[chosen]
    misses = count_misses(outcome, accepted, shape.depth)  # [K, classes]
    step, draft = tried_drafts(steps, shape.depth)
    counts: dict[str, Any] = {
        "steps": len(outcome),
        "all_accepted": int((outcome == Outcome.ALL_ACCEPTED).sum()),  # steps that accepted a draft at each depth
        "text_ended": int((outcome == Outcome.TEXT_ENDED).sum()),  # that the end of the text cut, after accepted drafts
        # At each depth, the steps whose first missed draft was there, by class; the drafts behind accepted ones; and
        # those that were accepted.
        "misses": [{miss.name.lower(): int(row[miss]) for miss in MISSES} for row in misses],
        "tried": draft[chosen[step]].bincount(minlength=shape.depth).tolist(),
        "accepted": [int((accepted > depth).sum()) for depth in range(shape.depth)],
    }
    assert counts["steps"] == int(misses.sum()) + counts["all_accepted"] + counts["text_ended"]
    return counts


def _measure_form(
    pair: Pair, drafter: ReplayableDrafter, options: EvaluateOptions, shape: TreeShape, prompts: list[list[int]]
) -> dict[str, Any]:
    """Measure the steps along greedy texts after prompts in one form, plain or in the chat template."""
    engine, ends = pair.engine, end_tokens(pair.engine.model, pair.tokenizer)
    how: dict[str, Any] = {"end_ids": ends, "batch_size": options.batch_size, "options": engine.options}
    texts = write_texts(engine.target, prompts, options.new_tokens, **how)
    stats = ReplayStats.sum(shape, replay(drafter, engine.target, texts, [shape])[0])
    per_step = stats.tokens_per_step if stats.steps else None
    return {"steps": stats.steps, "tokens_per_step": per_step, "acceptance": stats.acceptance}


# The steps along texts: why the first missed draft of each was missed


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
    Returns `[K, len(MISSES)]` int64; entry d is of draft d + 1.
    """
    missed = outcome < len(MISSES)
    cell = accepted[missed] * len(MISSES) + outcome[missed]
    return cell.bincount(minlength=depth * len(MISSES)).view(depth, len(MISSES))


def tried_drafts(steps: Steps, depth: int) -> tuple[Tensor, Tensor]:
    """Return the drafts that the steps tried: those that are accepted and the first that is not.

    What is behind the end of a text is not tried. Returns the step of each of the D drafts, and its index in the draft
    from 0, `[D]` int64 each.
    """
    tried = (steps.accepted + 1).minimum(steps.left).clamp(max=depth)  # [S]
    step = torch.arange(len(tried)).repeat_interleave(tried)  # [D]
    return step, torch.arange(len(step)) - (tried.cumsum(0) - tried)[step]


def describe_drafts(steps: Steps, probabilities: Sequence[Tensor], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the drafts that the steps tried.

    `probabilities` holds what the base gave each token, `[T]` float32 for each text of T tokens. Returns, of each of D
    drafts: the probability of the text's token at its place, `[D]` float32; the tokens before it, `[D]` int64; whether
    it was accepted, `[D]` bool.
    """
    step, draft = tried_drafts(steps, depth)
    position = steps.pending[step] + 1 + draft  # also the tokens before it
    lengths = torch.tensor([len(text) for text in probabilities])
    starts = lengths.cumsum(0) - lengths
    probability = torch.cat(list(probabilities))[starts[steps.text[step]] + position]
    return probability, position, draft < steps.accepted[step]


def bucket_drafts(names: Sequence[str], value: Tensor, accepted: Tensor, bounds: Tensor) -> list[dict[str, Any]]:
    """Count the drafts by a value of theirs, `[D]`, and those that are `accepted`, `[D]` bool, in buckets.

    `bounds` are the lowest values of all buckets but the first, rising.
    """
    bucket = torch.bucketize(value, bounds, right=True)  # [D]
    drafts, hits = (part.bincount(minlength=len(names)).tolist() for part in (bucket, bucket[accepted]))
    return [
        {"name": name, "drafts": count, "accepted": hit} for name, count, hit in zip(names, drafts, hits, strict=True)
    ]


@torch.inference_mode()
def trace_steps(drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape) -> Steps:
    """Take the steps that `replay` counts, and tell of each how its first missed draft was missed.

    The drafter must be in eval mode, on the target's device and in its dtype.
    """
    shapes, rows = [shape, replace(shape, node_budget=shape.lattice)], list[list[int]]()

    def trace(at: Positions) -> Tensor:
        accepted = count_accepted(drafter, target, at, shapes)[0]  # [A, 2]
        missed = accepted[:, :1].clamp(max=shape.depth - 1)
        return torch.cat([accepted, _ranks(drafter, target, at).gather(1, missed)], dim=1)  # [A, 3]

    for index, found in measure_positions(drafter, target, texts, [shape], trace):
        pending = pending_positions(texts, index)
        for step in steps_taken(found[:, 0].tolist()):
            rows.append([index, pending[step], len(pending) - step, *found[step].tolist()])
    return Steps(*torch.tensor(rows, dtype=torch.long).reshape(-1, len(fields(Steps))).unbind(1))


@torch.inference_mode()
def best_guess_share(drafter: ReplayableDrafter, target: Target, texts: Texts, depth: int) -> list[float | None]:
    """Return how often the drafter's best guess is the text's own token, after the text's own tokens before it.

    Every position of what follows the prompts counts, and no noise is shared, so texts of any origin can be compared.

    The drafter must be in eval mode, on the target's device and in its dtype.

    Returns the share at each of `depth` drafts, from 0 to 1; None where no text is long enough.
    """
    plain = replace(texts, temperature=0.0, seeds=None)
    right, count = torch.zeros(depth, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for group in group_texts(plain, target.vocab_size):
        for part in read_positions(drafter, target, plain, group, [TreeShape(1, depth, None)]):
            count += (part.state.tokens[:, 1:-1] >= 0).sum(dim=0).cpu()
            right += (_ranks(drafter, target, part) == 0).sum(dim=0).cpu()
    return [one / of if of else None for one, of in zip(right.tolist(), count.tolist(), strict=True)]


@torch.inference_mode()
def base_probabilities(target: Target, texts: Texts) -> list[Tensor]:
    """Compute how likely the base held each token of each text, at the texts' temperature; at 1 for greedy texts.

    Returns `[T]` float32 for each text of T tokens; 1 for its first token.
    """
    found: dict[int, Tensor] = {}
    with Teacher(target.model) as teacher:
        for group in group_texts(texts, target.vocab_size):
            tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True)  # [B, T]
            logits = teacher.read_batch(tokens.to(target.device)).logits  # [B, T, V]
            for row, index in enumerate(group):
                length = len(texts.tokens[index])
                scores = logits[row, : length - 1].float() / (texts.temperature or 1.0)
                own = tokens[row, 1:length, None].to(target.device)
                probability = scores.softmax(dim=-1).gather(1, own)[:, 0].cpu()
                found[index] = torch.cat([torch.ones(1), probability])
    return [found[index] for index in range(len(texts.tokens))]


def _ranks(drafter: ReplayableDrafter, target: Target, at: Positions) -> Tensor:
    """Rank the text's own tokens among the drafter's scores, as the search makes them, `[A, K]` int64.

    -1 stands for tokens that the drafter does not know, and for those past the end of the text.
    """
    tokens, ranks = at.state.tokens[:, :-1], list[Tensor]()  # [A, K+1]
    label = drafter.index_ids()[tokens.clamp(min=0)].where(tokens >= 0, -1)
    depth = tokens.shape[1] - 1
    proposer = drafter.proposer(target, 1, depth, 1 + depth, None, False)
    expand = proposer.scores(at.state, at.sampler, at.noise, at.context)
    for k in range(depth):
        scores = expand(k, tokens[:, k : k + 1].clamp(min=0), torch.zeros_like(tokens[:, :1]))
        scores = scores.spread(drafter.lm_head.out_features) if isinstance(scores, Candidates) else scores
        ranks.append(rank_of(scores[:, 0], label[:, k + 1]))
    return torch.stack(ranks, dim=1)
