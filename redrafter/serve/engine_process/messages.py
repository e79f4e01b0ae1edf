"""What the server and its engine's process say to each other. Texts have numbers, which the server gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrafter.app.options import DraftOptions, LoadOptions
from redrafter.grammar.source import GrammarSource
from redrafter.scheduler.logprobs import PromptScore
from redrafter.scheduler.sequence import SamplingParams, SequenceDelta
from redrafter.serve.config import ServeOptions

__all__ = [
    "Cancel",
    "EngineFacts",
    "EngineLoad",
    "LoadEngine",
    "LoadFailed",
    "PromptFacts",
    "Refused",
    "Submit",
    "Written",
]


@dataclass(frozen=True)
class LoadEngine:
    """The first message of a server: load this.

    Attributes:
        options: How much is served at once.
        load: The model and its drafter, and how to load them.
        draft: What drafts without a drafter.
    """

    options: ServeOptions
    load: LoadOptions
    draft: DraftOptions


@dataclass(frozen=True)
class EngineFacts:
    """The answer of an engine that is loaded: what its server must know of it.

    Attributes:
        model: Directory or hub id of the model.
        description: Lines for the log that say what is served.
        vocab_size: Number of token ids.
        context: Most tokens of a prompt and the text after it.
        end_tokens: Ids that end a text.
        sampling: Sampling parameters of requests that leave them out, by name.
        draft_depth: Levels of the deepest tree of drafts.
        reuse: Whether prompts are looked for in the cache.
    """

    model: str
    description: tuple[str, ...]
    vocab_size: int
    context: int
    end_tokens: frozenset[int]
    sampling: Mapping[str, float]
    draft_depth: int
    reuse: bool


@dataclass(frozen=True)
class LoadFailed:
    """The answer of an engine that cannot be loaded.

    Attributes:
        error: Why.
    """

    error: Exception


@dataclass(frozen=True)
class Submit:
    """A request for texts.

    Attributes:
        numbers: Number of each text.
        prompts: Token ids of each prompt.
        max_new_tokens: Most tokens that may follow each.
        params: How tokens are drawn, without a grammar; text i is drawn with the seed + i.
        grammar: Grammar that the texts must follow, or None.
        client: Who asks.
        cache_salt: Prefixes are reused only from requests with the same salt.
    """

    numbers: tuple[int, ...]
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    params: SamplingParams
    grammar: GrammarSource | None
    client: str
    cache_salt: str | None


@dataclass(frozen=True)
class Cancel:
    """Texts that nobody waits for any more. Those that have ended are left alone.

    Attributes:
        numbers: Their numbers.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """A request that is not served.

    Attributes:
        numbers: Numbers of its texts.
        error: Why.
    """

    numbers: tuple[int, ...]
    error: Exception


@dataclass(frozen=True)
class PromptFacts:
    """What is known of a prompt once it is read.

    Attributes:
        reused: How many of its tokens were in the cache already.
        scores: Scores of its tokens but the first; empty unless asked for.
    """

    reused: int
    scores: Sequence[PromptScore] = ()


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        running: Texts that hold a place.
        waiting: Texts that wait for one.
        preempted: Number of texts that were put back into the queue so far.
        cache_usage: Share of the blocks of keys and values that texts hold, 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    preempted: int = 0
    cache_usage: float = 0.0


@dataclass(frozen=True)
class Written:
    """All that half a round wrote.

    Attributes:
        deltas: What texts have gained, with their numbers.
        prompts: What became known of prompts, by the number of their text.
        load: How busy the engine is now.
    """

    deltas: Sequence[tuple[int, SequenceDelta]]
    prompts: Mapping[int, PromptFacts]
    load: EngineLoad
