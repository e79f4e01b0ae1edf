"""The parameters that define how the tokens of a sequence are drawn, in `generate` and in a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from redrafter.grammar.grammar import Grammar
from redrafter.sampling.processors import CUTS, EDITS, OwnProcessor, RowProcessor, ThinkingBudget


@dataclass(frozen=True)
class SamplingParams:
    """Defines how the tokens of a sequence are drawn, under the names that `generate` uses.

    The defaults sample at temperature 1 and leave every other logits processor off.

    Attributes:
        temperature: Divisor of the logits; 0 for greedy decoding.
        top_k: Sample from this many of the likeliest tokens; 0 for all.
        top_p: Sample from the likeliest tokens whose probabilities add up to this; 1 for all.
        min_p: Drop tokens less likely than this share of the likeliest token's probability.
        repetition_penalty: Divide (or multiply, if negative) logits of tokens that occur in prompt or output.
        frequency_penalty: Subtract this times the number of occurrences in the output from a token's logit.
        presence_penalty: Subtract this from the logits of tokens that occur in the output.
        logit_bias: Number to add to the logit of each token id.
        min_new_tokens: Minimum number of tokens before one of `stop_token_ids` may be drawn.
        stop_token_ids: Token ids that end the sequence.
        seed: Key of the noise, from 0 to 2**63 - 1.
        logprobs: Number of likeliest tokens to report with each new token; None for no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        thinking: Budget of the tokens of a thought at the start of the output; None for no budget.
        grammar: Grammar that the output must follow, or None.
        num_speculative_tokens: Most successive drafts that a step may accept; 0 for no drafts, None for the whole tree.
        extra: The caller's own processors, each with the settings of this row. They come after transformers' processors
            that edit single tokens, and before this library's own, grammars and temperature.
        extra_last: The same, after all others.
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
    thinking: ThinkingBudget | None = None
    grammar: Grammar | None = None
    num_speculative_tokens: int | None = None
    extra: tuple[OwnProcessor, ...] = ()
    extra_last: tuple[OwnProcessor, ...] = ()

    @property
    def speculate(self) -> bool:
        """Return whether the row verifies drafts, if the batch does."""
        return self.num_speculative_tokens != 0

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        return self.temperature == 0

    @cached_property
    def asked(self) -> tuple[type[RowProcessor], ...]:
        """The processors of `EDITS` and `CUTS` that change scores; cuts, which need a sort, only when sampling."""

        def changes(name: str) -> bool:
            return name != "stop_token_ids" and getattr(self, name) != getattr(NEUTRAL, name)

        return tuple(kind for kind in (EDITS if self.greedy else (*EDITS, *CUTS)) if any(map(changes, kind.reads)))

    @cached_property
    def edits(self) -> bool:
        """Return whether scores of single tokens change: by a penalty, a bias, or a minimum number of tokens."""
        return any(kind in EDITS for kind in self.asked)

    @cached_property
    def cuts(self) -> bool:
        """Return whether unlikely tokens are never sampled, which takes a sort of the vocabulary."""
        return any(kind in CUTS for kind in self.asked)

    @property
    def has_tables(self) -> bool:
        """Return whether there are settings as large as the vocabulary."""
        own = (*self.extra, *self.extra_last)
        wide = any(setting.dim() > 1 for each in own for setting in each.settings)
        return wide or bool(self.logit_bias) or self.min_new_tokens > 0

    @cached_property
    def asks_host(self) -> bool:
        """Return whether a step runs Python code of a processor."""
        own = (*self.extra, *self.extra_last)
        return self.grammar is not None or any(each.on_host for each in own)


NEUTRAL = SamplingParams()
# Names of the numeric parameters of processors, as in calls, requests and commands.
NUMBERS = [name for kind in (*EDITS, *CUTS) for name in kind.reads if isinstance(getattr(NEUTRAL, name), int | float)]
