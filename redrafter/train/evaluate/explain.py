"""Explain the acceptance of a pair's drafts: why steps end, and which conditions affect acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import TypedDict

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
NEAR = 2  # a rank below this multiple of the beams is a near miss


class Bucket(TypedDict):
    """Counts of the drafts in a range of a value."""

    name: str
    drafts: int
    accepted: int


class StepCounts(TypedDict):
    """Counts of how steps ended."""

    steps: int
    all_accepted: int  # steps that accepted a draft at each depth
    text_ended: int  # steps cut by the end of the text after accepted drafts
    misses: list[dict[str, int]]  # by depth: steps whose first missed draft has this depth, by class
    tried: list[int]  # by depth: drafts whose predecessors were accepted
    accepted: list[int]  # by depth: accepted drafts


class TemperatureExplanation(TypedDict):
    """The explanation of the texts of one temperature."""

    temperature: float  # 0 for greedy
    tokens_per_step: float | None
    margin: float | None  # half of the 95 % confidence interval of `tokens_per_step`, over texts
    all_steps: StepCounts
    categories: dict[str, StepCounts]
    by_probability: list[Bucket]  # drafts by the base's probability of its own token
    by_context: list[Bucket]  # drafts by the number of preceding tokens
    # At each depth, the fraction of positions where the drafter's top token equals the base's, given the text's own
    # tokens and without noise.
    best_guess: list[float | None]


class FormResult(TypedDict):
    """Statistics on greedy texts after prompts in one form, plain or in the chat template."""

    steps: int
    tokens_per_step: float | None
    margin: float | None  # as in `TemperatureExplanation`
    acceptance: list[float | None]


class Explanation(TypedDict):
    """The entry `explanation` of the JSON document."""

    tree: str
    prompts: int
    beams: int
    depth: int
    nodes: int | None  # verified nodes, including the root
    lattice: int  # nodes of the search, including the root
    head: int  # size of the drafter's vocabulary
    vocabulary: int
    temperatures: list[TemperatureExplanation]
    data: list[str]
    best_guess_on_data: list[float | None] | None  # None without training data
    data_has_temperature: bool
    data_temperature: float | None
    form_prompts: int
    plain: FormResult | None  # None without a chat template
    template: FormResult | None


@dataclass(frozen=True)
class OtherTexts:
    """Texts that an evaluation is compared with, loaded before the measurement."""

    training: Texts | None  # texts of the drafter's training data; None if none was given
    has_temperature: bool  # whether their rows record the temperature of their generation
    plain: list[list[int]]  # token ids of some prompts as plain text; none without a chat template
    templated: list[list[int]]  # token ids of the same prompts in the chat template

    @classmethod
    def load(cls, pair: Pair, options: EvaluateOptions, max_tokens: int) -> "OtherTexts":
        """Load the texts for a pair, with prompts of at most `max_tokens` tokens."""
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
) -> Explanation:
    """Explain the acceptance of a pair, as an entry of the JSON document.

    `categories` maps categories to numbers of prompts; the texts are in this order. In the result `best_guess_on_data`
    is None without training data, and `plain` and `template` are None without a chat template. The data are compared
    with the base's text at `data_temperature`.
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
        "prompts": sum(categories.values()),
        "beams": shape.beams,
        "depth": shape.depth,
        "nodes": shape.node_budget,
        "lattice": shape.lattice,
        "head": drafter.config.draft_vocab_size or target.vocab_size,
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
) -> TemperatureExplanation:
    """Explain the acceptance on the texts of one temperature; takes the arguments of `explain`."""
    steps = trace_steps(drafter, target, texts, shape)
    sizes = torch.tensor(list(categories.values()))
    category = torch.arange(len(sizes)).repeat_interleave(sizes)[steps.text]  # [S]
    probability, context, accepted = describe_drafts(steps, base_probabilities(target, texts), shape.depth)
    # A step at the end of a text cannot emit more tokens than are left.
    emitted = (steps.accepted + 1).minimum(steps.left)  # [S]
    by_text = (steps.text.bincount(weights, len(texts.tokens)).tolist() for weights in (emitted.double(), None))
    bounds = torch.tensor(CONTEXTS) + 1
    return {
        "temperature": texts.temperature,
        "tokens_per_step": float(emitted.double().mean()) if len(category) else None,
        "margin": mean_margin(*by_text),
        "all_steps": _count_steps(steps, shape, category >= 0),
        "categories": {name: _count_steps(steps, shape, category == index) for index, name in enumerate(categories)},
        "by_probability": bucket_drafts(PROBABILITY_NAMES, probability, accepted, torch.tensor(PROBABILITIES)),
        "by_context": bucket_drafts(CONTEXT_NAMES, context, accepted, bounds),
        "best_guess": best_guess_share(drafter, target, texts, shape.depth),
    }


def _count_steps(steps: "Steps", shape: TreeShape, chosen: Tensor) -> StepCounts:
    """Count how the steps `chosen` `[S]` bool ended."""
    outcome, accepted = classify(steps, shape.beams, shape.depth)[chosen], steps.accepted[chosen]
    misses = count_misses(outcome, accepted, shape.depth)  # [K, classes]
    step, draft = tried_drafts(steps, shape.depth)
    counts: StepCounts = {
        "steps": len(outcome),
        "all_accepted": int((outcome == Outcome.ALL_ACCEPTED).sum()),
        "text_ended": int((outcome == Outcome.TEXT_ENDED).sum()),
        "misses": [{miss.name.lower(): int(row[miss]) for miss in MISSES} for row in misses],
        "tried": draft[chosen[step]].bincount(minlength=shape.depth).tolist(),
        "accepted": [int((accepted > depth).sum()) for depth in range(shape.depth)],
    }
    assert counts["steps"] == int(misses.sum()) + counts["all_accepted"] + counts["text_ended"]
    return counts


def _measure_form(
    pair: Pair, drafter: ReplayableDrafter, options: EvaluateOptions, shape: TreeShape, prompts: list[list[int]]
) -> FormResult:
    """Measure steps on greedy texts after prompts in one form, plain or in the chat template."""
    engine = pair.engine
    texts = write_texts(
        engine.target,
        prompts,
        options.new_tokens,
        end_ids=end_tokens(engine.model, pair.tokenizer),
        batch_size=options.batch_size,
        options=engine.options,
    )
    by_text = replay(drafter, engine.target, texts, [shape])[0]
    stats = ReplayStats.sum(shape, by_text)
    margin = mean_margin([each.emitted for each in by_text], [each.steps for each in by_text])
    per_step = stats.tokens_per_step if stats.steps else None
    return {"steps": stats.steps, "tokens_per_step": per_step, "margin": margin, "acceptance": stats.acceptance}


def mean_margin(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return half of the 95 % confidence interval of `sum(sums) / sum(counts)`; None for fewer than two texts.

    The steps of one text are alike, so texts are the independent samples; entry i is of text i.
    """
    total, texts = sum(counts), len(counts)
    if texts < 2 or not total:
        return None
    mean = sum(sums) / total
    variance = sum((part - mean * count) ** 2 for part, count in zip(sums, counts, strict=True)) * texts / (texts - 1)
    return 1.96 * variance**0.5 / total


# Steps on texts, classified by the reason of their first missed draft


class Outcome(IntEnum):
    """The reason that ended a step: a miss of one of four classes, the end of the draft, or the end of the text."""

    OUTSIDE_HEAD = 0
    NEAR_MISS = 1
    WRONG_GUESS = 2
    NODE_BUDGET = 3
    ALL_ACCEPTED = 4
    TEXT_ENDED = 5


MISSES = tuple(outcome for outcome in Outcome if outcome < Outcome.ALL_ACCEPTED)


@dataclass(frozen=True)
class Steps:
    """S steps of speculative decoding on texts."""

    text: Tensor  # index of each step's text, `[S]` int64
    pending: Tensor  # position of its pending token in the text, `[S]` int64
    left: Tensor  # number of tokens that follow the pending one, `[S]` int64
    accepted: Tensor  # accepted drafts, `[S]` int64
    searched: Tensor  # drafts that would be accepted if all nodes of the search were verified, `[S]` int64
    # Rank of the token that follows the accepted drafts in the drafter's scores: 0 for the highest score, -1 outside of
    # the drafter's vocabulary; `[S]` int64.
    rank: Tensor


def rank_of(scores: Tensor, label: Tensor) -> Tensor:
    """Return the number of scores `[A, V']` above the score of `label` `[A]` int64, `[A]`; -1 for a label of -1."""
    own = scores.gather(1, label.clamp(min=0)[:, None])
    return (scores > own).sum(dim=1).where(label >= 0, -1)


def classify(steps: Steps, beams: int, depth: int) -> Tensor:
    """Return the `Outcome` of each step, `[S]` int64. The order matters: later conditions override earlier ones."""
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
    """Return the drafts that the steps tried: the accepted ones and the first rejected one.

    Drafts past the end of a text are not tried. Returns the step of each of the D drafts and its depth from 0, `[D]`
    int64 each.
    """
    tried = (steps.accepted + 1).minimum(steps.left).clamp(max=depth)  # [S]
    step = torch.arange(len(tried)).repeat_interleave(tried)  # [D]
    return step, torch.arange(len(step)) - (tried.cumsum(0) - tried)[step]


def describe_drafts(steps: Steps, probabilities: Sequence[Tensor], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the drafts that the steps tried.

    `probabilities` are the base's probabilities of each text's tokens, `[T]` float32 for a text of T tokens. Returns
    for each of D drafts: the probability of the text's token at its position, `[D]` float32; the number of preceding
    tokens, `[D]` int64; whether it was accepted, `[D]` bool.
    """
    step, draft = tried_drafts(steps, depth)
    position = steps.pending[step] + 1 + draft  # equals the number of preceding tokens
    lengths = torch.tensor([len(text) for text in probabilities])
    starts = lengths.cumsum(0) - lengths
    probability = torch.cat(list(probabilities))[starts[steps.text[step]] + position]
    return probability, position, draft < steps.accepted[step]


def bucket_drafts(names: Sequence[str], value: Tensor, accepted: Tensor, bounds: Tensor) -> list[Bucket]:
    """Count drafts, and those with `accepted` `[D]` bool, in buckets of `value`, `[D]`.

    `bounds` are the lower bounds of all buckets except the first, in ascending order.
    """
    bucket = torch.bucketize(value, bounds, right=True)  # [D]
    drafts, hits = (part.bincount(minlength=len(names)).tolist() for part in (bucket, bucket[accepted]))
    return [
        {"name": name, "drafts": count, "accepted": hit} for name, count, hit in zip(names, drafts, hits, strict=True)
    ]


@torch.inference_mode()
def trace_steps(drafter: ReplayableDrafter, target: Target, texts: Texts, shape: TreeShape) -> Steps:
    """Return the steps that `replay` counts, with the data that classify the first missed draft of each.

    The drafter must be in eval mode, on the target's device and in its dtype.
    """
    # The second shape verifies all nodes: if it accepts more, the node budget caused the miss.
    # The whole lattice is counted too, to separate drafts that the node budget cut from tokens that were never drafted.
    shapes, rows = [shape, replace(shape, node_budget=shape.lattice)], list[list[int]]()

    def trace(at: Positions) -> Tensor:
        accepted = count_accepted(drafter, target, at, shapes)[0]  # [A, 2]
        # A step that accepted all drafts has no missed one: `classify` overrides the class that its rank gives.
        missed = accepted[:, :1].clamp(max=shape.depth - 1)
        return torch.cat([accepted, _ranks(drafter, target, at).gather(1, missed)], dim=1)  # [A, 3]

    for index, found in measure_positions(drafter, target, texts, [shape], trace):
        pending = pending_positions(texts, index)
        for step in steps_taken(found[:, 0].tolist()):
            rows.append([index, pending[step], len(pending) - step, *found[step].tolist()])
    return Steps(*torch.tensor(rows, dtype=torch.long).reshape(-1, len(fields(Steps))).unbind(1))


@torch.inference_mode()
def best_guess_share(drafter: ReplayableDrafter, target: Target, texts: Texts, depth: int) -> list[float | None]:
    """Return how often the drafter's top token equals the text's token, given the text's preceding tokens.

    Every position after the prompts counts, without shared noise, so texts of any origin can be compared.

    The drafter must be in eval mode, on the target's device and in its dtype.

    Returns the share at each of `depth` drafts, from 0 to 1; None where no text is long enough.
    """
    # Greedy texts need no noise, so this removes it from the search.
    plain = replace(texts, temperature=0.0, seeds=None)
    right, count = torch.zeros(depth, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for group in group_texts(plain, target.vocab_size):
        for part in read_positions(drafter, target, plain, group, [TreeShape(1, depth, None)]):
            count += (part.state.tokens[:, 1:-1] >= 0).sum(dim=0).cpu()
            right += (_ranks(drafter, target, part) == 0).sum(dim=0).cpu()
    return [one / of if of else None for one, of in zip(right.tolist(), count.tolist(), strict=True)]


@torch.inference_mode()
def base_probabilities(target: Target, texts: Texts) -> list[Tensor]:
    """Compute the base's probability of each token of each text at the texts' temperature, or 1 for greedy texts.

    Returns `[T]` float32 for each text of T tokens; 1 for its first token.
    """
    found: dict[int, Tensor] = {}
    with Teacher(target.model) as teacher:
        # Logits of a whole text are kept at once, so texts are grouped by the memory that these take.
        for group in group_texts(texts, target.vocab_size):
            tokens = pad_sequence([torch.tensor(texts.tokens[i]) for i in group], batch_first=True)  # [B, T]
            logits = teacher.read_batch(tokens.to(target.device)).logits  # [B, T, V]
            for row, index in enumerate(group):
                length = len(texts.tokens[index])
                # The likelihood at the temperature at which the text was sampled; greedy texts count as T=1.
                scores = logits[row, : length - 1].float() / (texts.temperature or 1.0)
                own = tokens[row, 1:length, None].to(target.device)
                probability = scores.softmax(dim=-1).gather(1, own)[:, 0].cpu()
                # The first token has no prediction.
                found[index] = torch.cat([torch.ones(1), probability])
    return [found[index] for index in range(len(texts.tokens))]


def _ranks(drafter: ReplayableDrafter, target: Target, at: Positions) -> Tensor:
    """Rank the text's own tokens in the drafter's scores during search, `[A, K]` int64.

    -1 marks tokens outside the drafter's vocabulary and positions past the end of the text.
    """
    tokens, ranks = at.state.tokens[:, :-1], list[Tensor]()  # [A, K+1]
    # Tokens outside of the drafter's head have no rank.
    label = drafter.index_ids()[tokens.clamp(min=0)].where(tokens >= 0, -1)
    depth = tokens.shape[1] - 1
    # A single beam that follows the text itself: ranks are relative to the correct prefix.
    proposer = drafter.proposer(target, 1, depth, 1 + depth, None, False)
    expand = proposer.scores(at.state, at.sampler, at.noise, at.context)
    for k in range(depth):
        scores = expand(k, tokens[:, k : k + 1].clamp(min=0), torch.zeros_like(tokens[:, :1]))
        if isinstance(scores, Candidates):
            scores = scores.spread(drafter.lm_head.out_features)
        assert isinstance(scores, Tensor), "an evaluation runs in one process"
        ranks.append(rank_of(scores[:, 0], label[:, k + 1]))
    return torch.stack(ranks, dim=1)
