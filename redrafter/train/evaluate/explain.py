"""Explain how many drafts of a pair are accepted: why steps ended, and what the acceptance depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.app.loading import Pair
from redrafter.checkpoints.tokenizers import end_tokens
from redrafter.drafting.drafter import RecurrentDrafter
from redrafter.model.target import Target
from redrafter.train.evaluate.misses import (
    MISSES,
    Outcome,
    Steps,
    base_probabilities,
    best_guess_share,
    bucket_drafts,
    classify,
    count_misses,
    describe_drafts,
    trace_steps,
    tried_drafts,
)
from redrafter.train.evaluate.options import EvaluateOptions
from redrafter.train.evaluate.replay import ReplayStats, Shape, replay
from redrafter.train.evaluate.texts import Texts, prompts_in_both_forms, read_training_texts, write_texts

PROBABILITIES, PROBABILITY_NAMES = (0.5, 0.9), ("below 0.5", "0.5 to 0.9", "0.9 or more")
CONTEXTS = (256, 512, 1024, 2048, 8192)  # tokens
CONTEXT_NAMES = (*(f"up to {most}" for most in CONTEXTS), f"above {CONTEXTS[-1]}")


@dataclass(frozen=True)
class StepCounts:
    """Counts how steps ended: `steps` is the sum of all misses, `all_accepted` and `text_ended`."""

    steps: int  # steps taken
    all_accepted: int  # steps that accepted a draft at each depth
    text_ended: int  # steps that the end of the text cut, after accepted drafts alone
    misses: list[dict[str, int]]  # at each depth, the steps whose first missed draft was there, by class
    tried: list[int]  # at each depth, the drafts behind accepted ones
    accepted: list[int]  # at each depth, the drafts that were accepted

    @property
    def missed(self) -> dict[str, int]:
        """Misses of all depths, by class."""
        return {miss.name.lower(): sum(depth[miss.name.lower()] for depth in self.misses) for miss in MISSES}


@dataclass(frozen=True)
class Bucket:
    """The drafts of one bucket, and those that were accepted."""

    name: str
    drafts: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted; None without drafts."""
        return self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class TemperatureExplanation:
    """Measurements along the texts of one temperature."""

    temperature: float  # temperature that the texts were written at; 0 for greedy
    tokens_per_step: float | None  # tokens that a step gave
    all_steps: StepCounts  # how steps ended
    categories: dict[str, StepCounts]  # how steps ended, by category of prompts
    by_probability: list[Bucket]  # drafts by the probability that the base gave its own token
    by_context: list[Bucket]  # drafts by the tokens before them
    # At each depth, the share of the base's own text at which the drafter's best guess was right, each after the text's
    # own tokens and without noise.
    best_guess: list[float | None]


@dataclass(frozen=True)
class Form:
    """Steps along greedy texts after prompts in one form, plain or in the chat template."""

    steps: int
    tokens_per_step: float | None
    acceptance: list[float | None]


@dataclass(frozen=True)
class Explanation:
    """Measurements that explain the acceptance of a pair."""

    tree: str  # tree that was explained
    beams: int
    depth: int
    nodes: int  # nodes that are verified, the root counted
    lattice: int  # nodes that its search finds, the root counted
    head: int  # tokens that the drafter's head knows
    vocabulary: int  # tokens that the base knows
    temperatures: list[TemperatureExplanation]  # what was measured at each temperature
    data: list[str]  # files of the training data; none if none were given
    best_guess_on_data: list[float | None] | None  # as `best_guess`, on the training data; None without it
    form_prompts: int  # prompts that were measured in both forms; 0 without a chat template
    plain: Form | None  # those prompts as plain text; None without a chat template
    template: Form | None  # those prompts in the chat template; None without one


@dataclass(frozen=True)
class OtherTexts:
    """Holds the texts that an evaluation is compared with, which are read before anything is measured."""

    training: Texts | None  # texts of the drafter's training data; None if none was given
    plain: list[list[int]]  # token ids of some prompts as plain text; none without a chat template
    templated: list[list[int]]  # token ids of the same prompts in the chat template

    @classmethod
    def read(cls, pair: Pair, options: EvaluateOptions, max_tokens: int) -> "OtherTexts":
        """Read the texts for a pair, with prompts of `max_tokens` tokens at most; raises as the readers do."""
        target, training = pair.engine.target, None
        if options.data:
            context = target.fixed_rope_context
            training = read_training_texts(options.data, pair.tokenizer, target.vocab_size, context, options.seed)
        forms = prompts_in_both_forms(options.prompts, pair.tokenizer, max_tokens, options.seed, **options.cut)
        return cls(training, *forms)


def explain(
    pair: Pair,
    drafter: RecurrentDrafter,
    options: EvaluateOptions,
    shape: Shape,
    categories: dict[str, int],
    texts: Sequence[Texts],
    others: OtherTexts,
) -> Explanation:
    """Explain the acceptance of a pair.

    `categories` holds the number of prompts of each category; the texts are in the order of the categories.
    """
    target = pair.engine.target
    assert shape.nodes is not None
    on_data = None
    if others.training is not None:
        on_data = best_guess_share(drafter, target, others.training, shape.depth)
    plain, template = (
        _measure_form(pair, drafter, options, shape, prompts) if prompts else None
        for prompts in (others.plain, others.templated)
    )
    return Explanation(
        str(shape),
        shape.beams,
        shape.depth,
        shape.nodes,
        shape.lattice,
        drafter.config.draft_vocab_size or target.vocab_size,
        target.vocab_size,
        [explain_temperature(drafter, target, written, shape, categories) for written in texts],
        list(options.data),
        on_data,
        len(others.plain),
        plain,
        template,
    )


def explain_temperature(
    drafter: RecurrentDrafter, target: Target, texts: Texts, shape: Shape, categories: dict[str, int]
) -> TemperatureExplanation:
    """Explain the acceptance along the texts of one temperature; the arguments are those of `explain`."""
    steps = trace_steps(drafter, target, texts, shape)
    sizes = torch.tensor(list(categories.values()))
    category = torch.arange(len(sizes)).repeat_interleave(sizes)[steps.text]  # [S]
    whole = _count_steps(steps, shape, category >= 0)
    probability, context, accepted = describe_drafts(steps, base_probabilities(target, texts), shape.depth)
    emitted = int((steps.accepted + 1).minimum(steps.left).sum())
    kinds = (PROBABILITY_NAMES, probability, PROBABILITIES), (CONTEXT_NAMES, context, [most + 1 for most in CONTEXTS])
    by_probability, by_context = (
        [Bucket(name, *pair) for name, pair in zip(names, bucket_drafts(of, accepted, bounds).tolist(), strict=True)]
        for names, of, bounds in kinds
    )
    return TemperatureExplanation(
        texts.temperature,
        emitted / whole.steps if whole.steps else None,
        whole,
        {name: _count_steps(steps, shape, category == index) for index, name in enumerate(categories)},
        by_probability,
        by_context,
        best_guess_share(drafter, target, texts, shape.depth),
    )


def _count_steps(steps: Steps, shape: Shape, chosen: Tensor) -> StepCounts:
    """Count how the steps `chosen` `[S]` bool ended."""
    outcome, accepted = classify(steps, shape.beams, shape.depth)[chosen], steps.accepted[chosen]
    misses = count_misses(outcome, accepted, shape.depth)  # [K, classes]
    step, draft = tried_drafts(steps, shape.depth)
    tried = draft[chosen[step]].bincount(minlength=shape.depth)  # [K]
    counts = StepCounts(
        len(outcome),
        int((outcome == Outcome.ALL_ACCEPTED).sum()),
        int((outcome == Outcome.TEXT_ENDED).sum()),
        [{miss.name.lower(): int(row[miss]) for miss in MISSES} for row in misses],
        tried.tolist(),
        [int((accepted > depth).sum()) for depth in range(shape.depth)],
    )
    assert counts.steps == sum(counts.missed.values()) + counts.all_accepted + counts.text_ended
    return counts


def _measure_form(
    pair: Pair, drafter: RecurrentDrafter, options: EvaluateOptions, shape: Shape, prompts: list[list[int]]
) -> Form:
    engine, ends = pair.engine, end_tokens(pair.engine.model, pair.tokenizer)
    texts = write_texts(
        engine.target,
        prompts,
        options.new_tokens,
        end_ids=ends,
        batch_size=options.batch_size,
        options=engine.options,
    )
    stats = ReplayStats.sum(shape, replay(drafter, engine.target, texts, [shape])[0])
    return Form(stats.steps, stats.tokens_per_step if stats.steps else None, stats.acceptance)
