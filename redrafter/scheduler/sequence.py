"""One text that a server was asked for."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from redrafter.cache.block_manager import BlockTable
from redrafter.engine.outputs import Stats
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.text import GuidedText
from redrafter.scheduler.prompt_logprobs import PromptScore

__all__ = ["Finish", "SamplingParams", "SequenceDelta", "TokenSequence"]

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How a row draws, in the names of `generate`. As they stand here, all but `seed` leave their processor off.

    temperature: 0 for greedy. ends: ids that end the text. logprobs: how many of the likeliest tokens are wanted beside
    the drawn one at each place; None for no log-probabilities. prompt_logprobs: the same of the prompt's own tokens.
    grammar: what the text must follow. speculate: whether the row keeps drafts, where rows beside it may.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    ends: frozenset[int] = frozenset()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculate: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def simple(self) -> bool:
        """Whether a temperature is all that stands between logits and draw."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        plain = not penalised and not self.logit_bias and not self.min_new_tokens and self.grammar is None
        return plain and (self.greedy or not cut)


@dataclass(frozen=True)
class SequenceDelta:
    """What a step added to a text. accepted: how many of the tokens, its first ones, were drafts. logprobs: of each
    token its own and those of the likeliest, by id; None unless asked for. finish: why the text ends here. drafted: how
    many drafts were verified; the first token comes without any, and so does what a plain step writes."""

    tokens: Sequence[int]
    accepted: int = 0
    logprobs: Sequence[tuple[float, Mapping[int, float]]] | None = None
    finish: Finish | None = None
    error: BaseException | None = None
    drafted: int = 0


@dataclass(eq=False)  # a text is only ever itself: comparing fields would look through whole prompts
class TokenSequence:
    """A prompt, what is to follow it, and how far that is.

    Attributes:
        prompt: Token ids.
        room: The most tokens that may follow; 0: the prompt is only read.
        settings: How tokens are drawn.
        sink: Told every piece, in the thread of the engine.
        stops: Told the tokens of a step; returns after which of them the text ends, or None.
        client: Who asked for it. Clients share the server fairly.
        salt: Only texts with the same one share blocks of the cache.
        text: The prompt and what was written.
        lease: Its blocks, while it has a place.
        read: Tokens whose keys and values are in its blocks.
        reused: Those that were there already when it was admitted.
        order: The number of its arrival, from 1; 0 before it was submitted.
        turn: The round in which it was given its last place; None if it never was.
        place: Its row.
        cancelled: Whether it shall end before its next step.
        ended: Whether it was told its last piece.
        stats: Of the steps that verified drafts.
        came, first: When it came, and when its first token did.
        prompt_scores: Of the prompt's tokens but the first, as far as it is read, where they were asked for.
    """

    prompt: Sequence[int]
    room: int
    settings: SamplingParams
    sink: Callable[["TokenSequence", SequenceDelta], object]
    stops: Callable[[Sequence[int]], int | None] | None = None
    client: str = ""
    salt: str | None = None
    text: list[int] = field(default_factory=list)
    lease: BlockTable | None = None
    read: int = 0
    reused: int = 0
    order: int = 0
    turn: int | None = None
    place: int | None = None
    cancelled: bool = False
    ended: bool = False
    stats: Stats = field(default_factory=Stats)
    came: float = field(default_factory=time.perf_counter)
    first: float | None = None
    prompt_scores: list[PromptScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = list(self.prompt)
        grammar = self.settings.grammar
        self.guide = None if grammar is None else GuidedText(grammar, self.settings.ends)

    @property
    def written(self) -> int:
        return len(self.text) - len(self.prompt)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and are not all there."""
        return self.settings.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def limit(self) -> int:
        """The most tokens that the text may come to."""
        return len(self.prompt) + self.room

    @property
    def to_read(self) -> int:
        """Tokens that must be in the cache before the row can step: all of a new prompt, or, of a text that was begun,
        all but the pending token."""
        return len(self.text) - (self.written > 0)
