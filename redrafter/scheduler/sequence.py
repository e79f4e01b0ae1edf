"""One text that a server was asked for."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from redrafter.cache.block_manager import BlockTable
from redrafter.engine.outputs import Stats
from redrafter.grammar.grammar import Grammar
from redrafter.grammar.text import GuidedText
from redrafter.scheduler.logprobs import PromptScore

__all__ = ["Finish", "SamplingParams", "SequenceDelta", "TokenSequence"]

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a sequence are drawn, under the names that `generate` uses.

    The defaults sample at temperature 1 and leave every other logits processor off.

    Attributes:
        temperature: Divisor of the logits; 0 for greedy decoding.
        top_k: Sample from this many of the likeliest tokens; 0 for all.
        top_p: Sample from the likeliest tokens whose probabilities add up to this; 1 for all.
        min_p: Drop tokens less likely than this share of the likeliest token's probability.
        repetition_penalty: Divide (or multiply, if negative) logits of tokens that occurred in prompt or text.
        frequency_penalty: Subtract this times the number of occurrences in the text from a token's logit.
        presence_penalty: Subtract this from the logits of tokens that occurred in the text.
        logit_bias: Number to add to the logit of each token id.
        min_new_tokens: Tokens to write before the first of `stop_token_ids` may be drawn.
        stop_token_ids: Token ids that end the sequence.
        seed: Key of the noise, from 0 to 2**62 - 1.
        logprobs: How many of the likeliest tokens to report beside each new token; None for no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        grammar: Grammar that the text must follow, or None.
        speculate: Whether the row verifies drafts, if rows beside it may.
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
    stop_token_ids: frozenset[int] = frozenset()
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
        max_new_tokens: The most tokens that may follow; 0: the prompt is only read.
        params: How tokens are drawn.
        sink: Told every delta, in the thread of the engine.
        find_stop: Told the tokens of a step; returns after which of them the text ends, or None.
        client: Who asked for it. Clients share the server fairly.
        cache_salt: Only texts with the same one share blocks of the cache.
        tokens: The prompt and what was written.
        block_table: Its blocks, while it has a place.
        prefilled: Tokens whose keys and values are in its blocks.
        reused: Those that were there already when it was admitted.
        arrival: The number of its arrival, from 1; 0 before it was submitted.
        admitted_round: The round in which it was given its last place; None if it never was.
        row: Its row.
        cancelled: Whether it shall end before its next step.
        ended: Whether it was told its last delta.
        stats: Of the steps that verified drafts.
        arrived_at, first_token_at: When it came, and when its first token did.
        prompt_scores: Of the prompt's tokens but the first, as far as it is read, where they were asked for.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    params: SamplingParams
    sink: Callable[["TokenSequence", SequenceDelta], object]
    find_stop: Callable[[Sequence[int]], int | None] | None = None
    client: str = ""
    cache_salt: str | None = None
    tokens: list[int] = field(default_factory=list)
    block_table: BlockTable | None = None
    prefilled: int = 0
    reused: int = 0
    arrival: int = 0
    admitted_round: int | None = None
    row: int | None = None
    cancelled: bool = False
    ended: bool = False
    stats: Stats = field(default_factory=Stats)
    arrived_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    prompt_scores: list[PromptScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        grammar = self.params.grammar
        self.guide = None if grammar is None else GuidedText(grammar, self.params.stop_token_ids)

    @property
    def written(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def needs_scores(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and are not all there."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt) - 1

    @property
    def max_length(self) -> int:
        """The most tokens that the text may come to."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def prefill_length(self) -> int:
        """Tokens that must be in the cache before the row can step: all of a new prompt, or, of a text that was begun,
        all but the pending token."""
        return len(self.tokens) - (self.written > 0)
