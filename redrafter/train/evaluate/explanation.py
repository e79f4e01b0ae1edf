"""The explanation of a pair's acceptance: counts and measured shares, without advice."""

from dataclasses import dataclass

from redrafter.train.evaluate.misses import MISSES

__all__ = ["Bucket", "Explanation", "Form", "StepCounts", "TemperatureExplanation"]


@dataclass(frozen=True)
class StepCounts:
    """Counts how steps ended: `steps` is the sum of all misses, `all_accepted` and `text_ended`.

    Attributes:
        steps: Steps taken.
        all_accepted: Steps that accepted a draft at each depth.
        text_ended: Steps that the end of the text cut, after accepted drafts alone.
        misses: At each depth, the steps whose first missed draft was there, by class.
        tried: At each depth, the drafts behind accepted ones.
        accepted: At each depth, the drafts that were accepted.
    """

    steps: int
    all_accepted: int
    text_ended: int
    misses: list[dict[str, int]]
    tried: list[int]
    accepted: list[int]

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
    """Measurements along the texts of one temperature.

    Attributes:
        temperature: Temperature that the texts were written at; 0 for greedy.
        tokens_per_step: Tokens that a step gave.
        all_steps: How steps ended.
        categories: How steps ended, by category of prompts.
        by_probability: Drafts by the probability that the base gave its own token.
        by_context: Drafts by the tokens before them.
        best_guess: At each depth, the share of the base's own text at which the drafter's best guess was right, each
            after the text's own tokens and without noise.
    """

    temperature: float
    tokens_per_step: float | None
    all_steps: StepCounts
    categories: dict[str, StepCounts]
    by_probability: list[Bucket]
    by_context: list[Bucket]
    best_guess: list[float | None]


@dataclass(frozen=True)
class Form:
    """Steps along greedy texts after prompts in one form, plain or in the chat template."""

    steps: int
    tokens_per_step: float | None
    acceptance: list[float | None]


@dataclass(frozen=True)
class Explanation:
    """Measurements that explain the acceptance of a pair.

    Attributes:
        tree: Tree that was explained.
        beams: Its beams.
        depth: Its depth.
        nodes: Nodes that are verified, the root counted.
        lattice: Nodes that its search finds, the root counted.
        head: Tokens that the drafter's head knows.
        vocabulary: Tokens that the base knows.
        temperatures: What was measured at each temperature.
        data: Files of the training data; none if none were given.
        best_guess_on_data: As `best_guess`, on the training data; None without it.
        form_prompts: Prompts that were measured in both forms; 0 without a chat template.
        plain: Those prompts as plain text; None without a chat template.
        template: Those prompts in the chat template; None without one.
    """

    tree: str
    beams: int
    depth: int
    nodes: int
    lattice: int
    head: int
    vocabulary: int
    temperatures: list[TemperatureExplanation]
    data: list[str]
    best_guess_on_data: list[float | None] | None
    form_prompts: int
    plain: Form | None
    template: Form | None
